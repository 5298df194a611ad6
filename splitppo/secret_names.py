"""Tells by the name of a setting, such as `openai_key`, whether it holds a secret; the rule is a best effort.

This module needs the standard library only.
"""

import re

HIDDEN = "(hidden)"
# The name of a secret, or the end of it: any `..._key` but those that a data set or a mapping has.
NAME = (
    r"(?:passw(?:or)?d|passwd|passphrase|passcode|pwd|secrets?|credentials?|auth(?:orization)?|bearer|cookies?|jwt|token"
    r"|(?:api|access|private|secret|signing|ssh|encryption|wandb|hf|auth)[-_]?keys?"
    r"|(?<=[a-z0-9])(?<!prompt)(?<!image)(?<!arg)(?<!sort)(?<!primary)(?<!public)[-_]key(?![-_a-z]))"
)
# A key is secret that has such a name anywhere, but not as the begin of another word, such as `tokenizer`.
SECRET_KEY = re.compile(rf"(?:{NAME}|(?<![a-z])pass)s?(?-i:(?![a-z]))", re.IGNORECASE)
