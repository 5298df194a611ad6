"""Decides what a launch script gets of this machine: which files, and which variables of the environment.

* Shell files (.sh, .bash) in the folder of the script or below are copied into the sandbox.
* Of other regular files that the script reads or tests, only this much is known: they exist, and if they are empty. The
  sandbox has a comment with a mark in their place, so that words that depend on their text are known to be unknown.
* Folders exist, and are empty.
* Sockets, FIFOs, devices and programs do not exist. A link is what it leads to.
* Variables exist if the script names them. One with the name of a secret has a mark instead of its value.
"""

import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from controller.commands.from_verl.shell.step import Step
from splitppo.config import ConfigError
from splitppo.secret_names import NAME

MAX_FILE_BYTES = 1 << 20
_MAX_BYTES = 8 << 20  # of all shell files
_MAX_PLACES = 200
_SHELL_FILES = (".sh", ".bash")
_RUN = ("source", ".", "bash", "sh")
# Commands that read or test the files that they name.
_READERS = {
    *_RUN,
    *("[", "[[", "test"),
    *("awk", "cat", "cut", "find", "grep", "head", "ls", "sed", "sort", "tail", "uniq", "wc"),
}
_MISSED = re.compile("(.+): No such file or directory")
# The sandbox has its own of these; programs are commands, which are answered by a mark.
_OF_SANDBOX = re.compile(r"/(answers\.bash|tools|dev|proc|sys|lib|lib64|usr/lib|usr/lib64)(/.*)?|.*/s?bin(/.*)?|/")
# Variables that change bash and the linker; no script gets them.
_OF_BASH = re.compile(r"BASH.*|PATH|PS4|PWD|OLDPWD|SHLVL|SHELLOPTS|POSIXLY_CORRECT|LD_.*|LC_.*|LANG|_|_ASK_.*")
# A variable is secret that ends so: MAX_TOKENS is none.
_SECRET_NAME = re.compile(rf".*{NAME}(_id)?|(.*_)?pass")
_SECRET_VALUE = re.compile(r"://[^/\s]*:[^/\s]*@")  # an address with a password


class LimitExceeded(ConfigError):
    """Raised for a script that takes more time, memory, processes, files or output than a launch script may."""


@dataclass(frozen=True)
class Place:
    """The content of the sandbox at one path: a folder without files (`content` is None), or a file.

    `is_read` is False if the content only stands for that of this machine's file.
    """

    content: bytes | None
    is_executable: bool = False
    is_read: bool = True


@dataclass
class Visible:
    """The files and variables of this machine that one launch script gets.

    They grow as runs of the script show what it reads.

    Attributes:
        script: the path of the script.
        text: the script's text.
        places: the content of the sandbox at the paths that the script reads or tests, apart from the script itself.
        unread: the paths of files of this machine that the script would run, and that are not read.
    """

    script: Path
    text: str
    places: dict[str, Place] = field(default_factory=dict)
    unread: dict[str, None] = field(default_factory=dict)

    def add(self, steps: Sequence[Step], messages: Sequence[tuple[int, str]]) -> bool:
        """Adds the files and folders that these commands read or test; returns True if one was added.

        Args:
            steps: the commands of a run.
            messages: line and text of bash's messages, which name files that a redirection has missed.

        Raises:
            LimitExceeded: the script names more of them than a launch script may.
        """
        num_before = len(self.places)
        for step, word in (*_read_words(steps), *_missed_words(steps, messages)):
            path = os.path.normpath(Path(step.folder, word))
            if path not in self.places and path != str(self.script.absolute()) and (place := self._place(path)):
                self.places[path] = place
                if len(self.places) > _MAX_PLACES:
                    raise LimitExceeded(f"{self.script.name} reads or tests more than {_MAX_PLACES} files and folders")
            if path in self.places and not self.places[path].is_read and _is_run(step, word):
                self.unread[path] = None
        return len(self.places) > num_before

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the variables of an environment that the script or a shell file that it reads names.

        The value of a secret is a mark, as of a command that cannot be run.
        """
        texts = [
            self.text,
            *(place.content.decode(errors="replace") for place in self.places.values() if place.content),
        ]
        names = {name for text in texts for name in re.findall(r"[A-Za-z_]\w*", text)} | {"TZ"}  # `date` reads it
        if any("~" in text for text in texts):
            names.add("HOME")
        return {
            name: f"@@0@${name}@@" if _is_secret(name, value) else value
            for name, value in environment.items()
            if name in names and is_of_scripts(name)
        }

    @property
    def uses_process_substitution(self) -> bool:
        """True if bash may need files under /dev/fd, for `<(...)` or `>(...)`."""
        contents = [place.content for place in self.places.values() if place.content]
        return any(re.search(rb"[<>]\(", content) for content in [self.text.encode(), *contents])

    def _place(self, path: str) -> Place | None:
        """Returns what the sandbox gets at a path of this machine; None if nothing."""
        try:
            status = os.stat(path)  # noqa: PTH116 - a path may be no text that a file can have
        except (OSError, ValueError):
            return None
        if _OF_SANDBOX.fullmatch(path):
            return None
        if stat.S_ISDIR(status.st_mode):
            return Place(None)
        if not stat.S_ISREG(status.st_mode):
            return None
        if (content := self._shell_file(path)) is not None:
            return Place(content, is_executable=bool(status.st_mode & 0o111))
        name = re.sub(r"[^A-Za-z0-9_.+-]", "_", Path(path).name)
        return Place(f"# @@0@{name}@@\n".encode() if status.st_size else b"", is_read=not status.st_size)

    def _shell_file(self, path: str) -> bytes | None:
        """Returns the content of a shell file in the script's folder or below; None for any other file.

        Where a link leads counts. No part of the path below the folder may be hidden.
        """
        folder, real = (Path(os.path.realpath(place)) for place in (self.script.absolute().parent, path))
        if not real.is_relative_to(folder) or real.suffix not in _SHELL_FILES:
            return None
        if any(part.startswith(".") for part in real.relative_to(folder).parts):
            return None
        try:
            with os.fdopen(os.open(real, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    return None
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError:
            return None
        num_bytes = len(content) + sum(len(place.content or b"") for place in self.places.values())
        return content if len(content) <= MAX_FILE_BYTES and num_bytes <= _MAX_BYTES else None


def is_of_scripts(name: str) -> bool:
    """Returns False for a variable that changes bash itself, which no script gets from the environment."""
    return not _OF_BASH.fullmatch(name)


def _is_secret(name: str, value: str) -> bool:
    return bool(_SECRET_NAME.fullmatch(name.lower()) or _SECRET_VALUE.search(value))


def _read_words(steps: Sequence[Step]) -> Iterator[tuple[Step, str]]:
    """Yields the words of commands that may name a file that the command reads or tests."""
    for step in steps:
        if step.name.endswith(_SHELL_FILES):
            yield from ((step, word) for word in step.words)
        elif step.name in _READERS:
            yield from ((step, word) for word in step.words[1:])


def _missed_words(steps: Sequence[Step], messages: Sequence[tuple[int, str]]) -> Iterator[tuple[Step, str]]:
    """Yields the files that bash has not found, each with the commands of that line."""
    for line, message in messages:
        if match := _MISSED.fullmatch(message):
            yield from ((step, match[1]) for step in steps if step.line == line and step.name not in _RUN)


def _is_run(step: Step, word: str) -> bool:
    """Returns True if bash would run this word of a command as a shell file."""
    if step.name in _RUN:
        return word == next((one for one in step.words[1:] if not one.startswith("-")), None)
    return word == step.name
