"""Runs a shell script in a sandbox with bash, and records the commands in which the script would start verl.

The sandbox has bash, tools whose output follows from their input, and the files that the script reads. The sandbox has
no network, and files that the script writes are lost. `answers.bash` replaces all other commands.
"""

import fcntl
import os
import platform
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

from rewards.code.bubblewrap import NoSandbox, is_root, isolated, shared_libraries
from splitppo.config import ConfigError

_ANSWERS = Path(__file__).with_name("answers.bash")
_TOOLS = """
awk basename cat cut date dirname env expr find grep head ls mkdir mktemp mv printf readlink realpath rm sed seq sort
tail tee touch tr uname uniq wc xargs
"""
# The sandbox shows the files that these commands name.
_READERS = ("source", ".", "bash", "sh", "[", "[[", "test", "ls", "cat")
_LIMIT_S = 10
_PROC = ("--proc", "/proc")  # for <(...); containers often forbid it
_MESSAGE = re.compile(r"[^:]*: line (\d+): (.*)")
_FIRST_FD = 200  # scripts use low numbers
# The first process waits for all others: when it ends, bubblewrap kills them.
_FIRST_PROCESS = (
    f'ulimit -t {_LIMIT_S} -f 4096; BASH_ENV=/answers.bash bash "$@"; status=$?;'
    " while kill -s 0 -- -1 2>/dev/null; do :; done; exit $status"
)


@dataclass(frozen=True)
class Step:
    """One command that bash ran in a script: file and line, working folder, and the command's text after expansion."""

    file: str
    line: int
    folder: str
    text: str

    @property
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


@dataclass(frozen=True)
class BashRun:
    """The record of one run of a shell script in the sandbox.

    Attributes:
        launches: for each command that starts verl, its line in the script and its words.
        calls: LINE@NAME of each command that was replaced, because it cannot run in the sandbox.
        steps: all commands, as bash traced them.
        messages: line and text of each error message of bash.
    """

    launches: list[tuple[int, list[str]]]
    calls: list[str]
    steps: list[Step]
    messages: list[tuple[int, str]]


@dataclass
class Bash:
    """Runs one shell script in a sandbox, which shows the files and folders that the script reads, read-only.

    Attributes:
        now_s: the time that `date` prints in the sandbox, in seconds since 1970.
        shown: the options of bubblewrap that show a file or folder in the sandbox, by path.
        programs: the programs that the script calls by their paths; these programs are replaced, too.
        sandbox: the command line of bubblewrap.

    Raises:
        NoSandbox: bubblewrap is not installed, or cannot start here.
        ConfigError: the script does not end in time.
    """

    script: Path
    now_s: int
    shown: dict[str, list[str]] = field(default_factory=dict)
    programs: set[str] = field(default_factory=set)
    sandbox: list[str] = field(default_factory=lambda: _sandbox())

    def run(
        self,
        environment: Mapping[str, str],
        failing: Collection[str] = (),
        arguments: Sequence[str] = (),
        *,
        passed: Collection[int] = (),
        strict: bool = False,
    ) -> BashRun:
        """Runs the script until a run needs no further files or programs in the sandbox; returns the last run's record.

        Args:
            environment: the environment variables of the script.
            failing: the replaced commands (LINE@NAME) that fail.
            arguments: the arguments of the script.
            passed: the lines of the script whose tests succeed.
            strict: runs the script with `set -u`.
        """
        settings = {"NOW": self.now_s, "STRICT": "u" if strict else "", "FAILING": f" {' '.join(failing)} "}
        settings |= {"PASSED": f" {' '.join(map(str, passed))} "}
        while True:
            settings["PROGRAMS"] = " ".join(self.programs)
            result = self._once(environment, settings, arguments)
            files = dict(_files_of(result.steps, self.shown))
            programs = _programs_of(result.steps) - self.programs
            if not files and not programs:
                return result
            self.shown |= files
            self.programs |= programs

    def _once(self, environment: Mapping[str, str], settings: Mapping[str, Any], arguments: Sequence[str]) -> BashRun:
        with tempfile.TemporaryFile() as trace, tempfile.TemporaryFile() as notes, tempfile.TemporaryFile() as errors:
            fds = [fcntl.fcntl(file, fcntl.F_DUPFD, _FIRST_FD) for file in (trace, notes)]
            variables = {"LANG": "C.UTF-8", **environment, "PATH": "/bin", "BASH_XTRACEFD": str(fds[0])}
            variables |= {f"_ASK_{name}": str(value) for name, value in {**settings, "NOTES_FD": fds[1]}.items()}
            command = [*self.sandbox, *self._files(), "--", "/bin/bash", "-c", _FIRST_PROCESS, "bash", str(self.script)]
            try:
                subprocess.run(
                    [*command, *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                    env=variables,
                    pass_fds=fds,
                    timeout=_LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired as late:
                raise ConfigError(f"{self.script.name} has not ended after {_LIMIT_S} s in bash") from late
            finally:
                for fd in fds:
                    os.close(fd)
            lines = _text(errors).splitlines()
            if lines and lines[0].startswith("bwrap: "):
                if "proc" in lines[0] and _PROC[0] in self.sandbox:
                    self.sandbox = [option for option in self.sandbox if option not in _PROC]
                    return self._once(environment, settings, arguments)
                raise NoSandbox(lines[0])
            launches, calls = _read_notes(_text(notes).split("\0")[:-1])
            messages = [(int(match[1]), match[2]) for match in map(_MESSAGE.match, lines) if match]
            return BashRun(launches, calls, [*_read_trace(_text(trace))], messages)

    def _files(self) -> Iterator[str]:
        yield from ("--dir", str(Path.cwd()))
        for options in self.shown.values():
            yield from options
        yield from ("--ro-bind", str(self.script.absolute()), str(self.script.absolute()), "--chdir", str(Path.cwd()))


def _sandbox() -> list[str]:
    """Returns the command line of bubblewrap that starts a sandbox with bash and the tools."""
    options = [*isolated(platform.node()), *(() if is_root() else ("--unshare-user",)), *shared_libraries()]
    options += ["--dev-bind", "/dev/null", "/dev/null", "--dev-bind", "/dev/urandom", "/dev/urandom"]
    options += [*_PROC, "--symlink", "/proc/self/fd", "/dev/fd", "--tmpfs", "/tmp"]  # noqa: S108
    options += ["--ro-bind-try", "/etc/localtime", "/etc/localtime", "--ro-bind", str(_ANSWERS), "/answers.bash"]
    for name, place in [("bash", "/bin/bash"), *((name, f"/tools/{name}") for name in _TOOLS.split())]:
        if (program := shutil.which(name)) is not None:
            options += ["--ro-bind", os.path.realpath(program), place]
    return [*options, "--symlink", "bash", "/bin/sh", "--symlink", "/tools/env", "/usr/bin/env"]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _read_notes(fields: Sequence[str]) -> tuple[list[tuple[int, list[str]]], list[str]]:
    """Parses the fields that `answers.bash` wrote into (commands that start verl, replaced commands as LINE@NAME)."""
    launches: list[tuple[int, list[str]]] = []
    calls: list[str] = []
    rest = iter(fields)
    for kind, line, num_words in zip(rest, rest, rest, strict=True):
        words = [*islice(rest, int(num_words))]
        if kind == "launch":
            launches.append((int(line), words))
        else:
            calls.append(f"{line}@{words[0]}")
    return launches, calls


def _read_trace(text: str) -> Iterator[Step]:
    entries = [entry.split("\x1f", 3) for entry in re.split("\x1e+", text)]
    for file, line, folder, command in (fields for fields in entries if len(fields) == 4):  # the last may be cut off
        if file and file != "/answers.bash" and not command.startswith("_ask_is_"):
            yield Step(file, int(line), folder, command.rstrip("\n"))


def _files_of(steps: Sequence[Step], shown: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yields each file or folder of this machine that the commands read, with the bubblewrap options that show it."""
    for step in steps:
        words = step.words
        if words and (words[0] in _READERS or words[0].endswith(".sh")):
            for word in words if words[0].endswith(".sh") else words[1:]:
                place = os.path.normpath(Path(step.folder, word))
                if place not in shown and not place.startswith("/dev/") and os.access(place, os.R_OK):
                    yield place, ["--dir", place] if Path(place).is_dir() else ["--ro-bind", place, place]


def _programs_of(steps: Sequence[Step]) -> set[str]:
    """Returns the programs, shell scripts aside, that the commands call by a path, such as ./tool."""
    return {
        word
        for word in (step.name for step in steps)
        if re.fullmatch(r"[\w./~+-]*/[\w.+-]+", word) and not word.endswith(".sh")
    }
