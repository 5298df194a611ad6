"""The commands and the keys that the pages show: those in blocks of code, and those in the text."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from splitppo.config import Config

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page
    for page in [
        *ROOT.glob("*.md"),
        *(page for folder in ("docs", "recipes") for page in (ROOT / folder).rglob("*.md")),
    ]
    if page.name != "CHANGELOG.md" and page.parent.name != "adr"
)
PROGRAMS = frozenset(
    (
        *("apt-get", "bash", "buf", "cd", "deploy/hosts/supervise.sh", "docker", "grpcurl", "kubectl", "make", "pip"),
        *("python", "python3", "sbatch", "scancel", "scontrol", "splitppo", "srun", "ssh", "systemctl", "tensorboard"),
        *("torchrun", "uv", "wandb"),
    )
)
PYTHONS = ("python", "python3", "bin/python")
OVERRIDE = re.compile(r"((?:run|data|rollout|evaluation|algorithm|actor|critic|placement|reward|reward_model|teacher"
                      r"|services|checkpoint|tracking|debug)(?:\.[a-z_0-9]+)+)=")  # fmt: skip
_FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`([^`]+)`")


@dataclass(frozen=True)
class Command:
    """One command of a page.

    Args:
        page: the page, below the root.
        text: the command as the page has it, its lines joined.
        words: its words, without the variables before it and what a shell does behind it.
    """

    page: str
    text: str
    words: Sequence[str]

    @property
    def module(self) -> str | None:
        """What `python -m` runs; None: another program."""
        if self.words[0] == "splitppo":
            return "controller"
        is_python = self.words[0].endswith(PYTHONS)
        return self.words[2] if is_python and self.words[1:2] == ["-m"] else None

    @property
    def arguments(self) -> Sequence[str]:
        """What comes behind the program, or behind the module of `python -m`."""
        return self.words[3:] if self.module and self.words[0] != "splitppo" else self.words[1:]


def commands() -> Iterator[Command]:
    """Yields every command of every page."""
    for page in PAGES:
        name = str(page.relative_to(ROOT))
        for text in _texts(page.read_text(encoding="utf-8")):
            for part in re.split(r" && | \| ", text):
                if words := _words(part):
                    yield Command(name, text, words)


def _texts(page: str) -> Iterator[str]:
    """Yields lines of blocks of code, joined where they end with a backslash, and what the text has in backticks."""
    blocks = [block for language, block in _FENCE.findall(page) if language == "sh"]
    rest = _FENCE.sub("", page)
    code = [line for line in rest.splitlines() if line.startswith("    ")]
    for block in [*blocks, "\n".join(code)]:
        for line in re.sub(r"\\\n\s*", "", block).splitlines():
            yield line.strip().removeprefix("$ ")
    text = "\n".join(line for line in rest.splitlines() if not line.startswith("    "))
    yield from (" ".join(found.split()) for found in _INLINE.findall(text))


def _words(text: str) -> list[str]:
    """Returns the words of a command; none if the text is no command."""
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return []
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        del words[0]
    if len(words) < 2 or not (words[0] in PROGRAMS or words[0].endswith("bin/python")):
        return []
    if "..." in words or words[:3] == ["python", "-m", "services.ROLE"]:
        return [word for word in words if word != "..."] if words[2:3] != ["services.ROLE"] else []
    return words


def yaml_blocks() -> Iterator[tuple[str, str]]:
    """Yields (page, text) of every block of YAML."""
    for page in PAGES:
        for language, block in _FENCE.findall(page.read_text(encoding="utf-8")):
            if language == "yaml":
                yield str(page.relative_to(ROOT)), block


def unknown_keys(tree: Mapping[str, Any], section: type[BaseModel] = Config, path: str = "") -> list[str]:
    """Returns the paths of keys that the configuration does not have."""
    unknown = []
    for name, value in tree.items():
        field = section.model_fields.get(name)
        if field is None:
            unknown.append(f"{path}{name}")
            continue
        below = section_of(field.annotation)
        for entry in value if isinstance(value, list) else [value]:
            if below is not None and isinstance(entry, dict):
                unknown += unknown_keys(entry, below, f"{path}{name}.")
    return unknown


def is_key(path: str) -> bool:
    """Says if the configuration has a key; below a mapping every name is one."""
    section: type[BaseModel] | None = Config
    for name in path.split("."):
        if section is None:
            return True
        if name not in section.model_fields:
            return False
        section = section_of(section.model_fields[name].annotation)
    return True


def section_of(kind: Any) -> type[BaseModel] | None:
    """Returns the section that a key holds, alone or in a list; None: it holds none, or a mapping of them."""
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    if getattr(kind, "__origin__", None) is dict or str(kind).startswith(("collections.abc.Mapping", "typing.Mapping")):
        return None
    return next((found for part in get_args(kind) if (found := section_of(part)) is not None), None)
