"""Hides what looks like a secret in texts of a run: its config, logs and events; the patterns are a best effort."""

import re

from splitppo.secret_names import HIDDEN, NAME

_VALUE = r"""[^\s"',;)}\]]+"""
# What may stand before a name in a word; bounded, so that the time for a long word grows as its length does.
_BEFORE = r"[\w-]{0,60}"
# Of a match the first group is kept, and the rest is hidden.
_PATTERNS = [
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        # a key that changed: both values, from the first such name of a line on
        rf"(?m:^)((?>.*?{NAME}: ))(?=.+(?: in the folder, | -> )).+",
        # name: value and name=value, also with quotes; a number behind `token` is one of a model's.
        rf"""({NAME}["']?\s*[:=]\s*(?:b?["'])?(?:(?:bearer|basic|token)\s+)?)(?!\(hidden\)|(?<=token[:=])\s*\d+(?![\w-])|(?<=token[:=]\s)\d+(?![\w-])){_VALUE}""",
        # --name value, "name", "value", and NAME value
        rf"""((?:-{_BEFORE}{NAME}|["']{_BEFORE}{NAME}["']|(?-i:[A-Z]_[A-Z_]{{0,60}}(?:TOKEN|SECRET|PASSWORD|KEY)\b))["']?[,\s]\s*["']?(?:(?:bearer|basic|token)\s+)?)(?!\(hidden\)){_VALUE}""",
        rf"\b(bearer:?\s+)(?!\(hidden\)){_VALUE}",
        rf"\b(basic\s+)(?!\(hidden\))(?=\S*\d|\S{{16}}){_VALUE}",
        r"(://)[^/\s@:]*:[^/\s@]+(?=@)",
        r"(hooks\.slack\.com/)\S+",
        r"()\b(?:sk|hf|ghp|gho|ghs|glpat|github_pat|xox[abp])[-_][\w-]{10,}",
        r"()\bAKIA[0-9A-Z]{12,}",
    )
]


def redacted(text: str) -> str:
    """Returns the text with HIDDEN in place of what looks like the value of a secret."""
    for pattern in _PATTERNS:
        text = pattern.sub(rf"\1{HIDDEN}", text)
    return text
