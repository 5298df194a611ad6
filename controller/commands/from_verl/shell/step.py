"""One command that bash ran in a launch script."""

import shlex
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Step:
    """One command that bash ran in a script: file and line, working folder, and the command's text after expansion."""

    file: str
    line: int
    folder: str
    text: str

    @cached_property
    def words(self) -> list[str]:
        """The words of the command, split as a shell splits them."""
        try:
            return shlex.split(self.text)
        except ValueError:
            return self.text.split()

    @property
    def name(self) -> str:
        """The first word of the command, which is the program; "" if the command has no words."""
        return next(iter(self.words), "")
