"""Runs a launch script with bash in a sandbox, and records the commands in which the script would start verl.

What the sandbox records was written by the script, which may write to the same descriptors: it is read as far as it
has the right form, and believed in nothing else.
"""

import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from controller.commands.from_verl.shell.sandbox import ANSWERS, new_records, run_bash, text_of
from controller.commands.from_verl.shell.step import Step
from controller.commands.from_verl.shell.visible import LimitExceeded, Visible
from rewards.code.bubblewrap import NoSandbox

LIMIT_S = 30.0  # for all runs of one script together
_ANSWERS_TEXT = Path(__file__).with_name("answers.bash").read_text(encoding="utf-8")
_MESSAGE = re.compile(r"[^:]*: line ([0-9]{1,9}): (.*)")
_NUMBER = re.compile("[0-9]{1,9}")
_MAX_PROGRAMS = 200


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


class Bash:
    """Runs one launch script in sandboxes, each with what `visible` allows, until a limit of time for all of them.

    Args:
        text: the text of the script.
        now_s: the time that `date` prints in the sandbox, in seconds since 1970.
        limit_s: the time that all runs together may take, in seconds.

    Raises (each run):
        NoSandbox: bubblewrap is not installed, or cannot start here.
        LimitExceeded: the script exceeds a limit, or the runs together that of time.
    """

    def __init__(self, script: Path, text: str, now_s: int, limit_s: float = LIMIT_S) -> None:
        self.visible = Visible(script, text)
        self._script = script
        self._now_s = now_s
        self._limit_s = limit_s
        self._ends_s = time.monotonic() + limit_s
        self._programs: set[str] = set()  # that the script calls by their paths; they are replaced, too
        self._has_proc = True

    def run(
        self,
        environment: Mapping[str, str],
        failing: Collection[str] = (),
        arguments: Sequence[str] = (),
        *,
        given: Mapping[str, str] | None = None,
        passed: Collection[int] = (),
        strict: bool = False,
    ) -> BashRun:
        """Runs the script until a run needs no further files or programs in the sandbox; returns the last run's record.

        Args:
            environment: the variables that the script gets if it names them.
            failing: the replaced commands (LINE@NAME) that fail.
            arguments: the arguments of the script.
            given: further variables, which the script gets in any case.
            passed: the lines of the script whose tests succeed.
            strict: runs the script with `set -u`.
        """
        settings = {"NOW": self._now_s, "STRICT": "u" if strict else "", "FAILING": f" {' '.join(failing)} "}
        settings |= {"PASSED": f" {' '.join(map(str, passed))} "}
        while True:
            settings["PROGRAMS"] = " ".join(sorted(self._programs))
            result = self._once({**self.visible.variables(environment), **(given or {})}, settings, arguments)
            has_more_places = self.visible.add(result.steps, result.messages)
            programs = _programs_of(result.steps) - self._programs
            if not has_more_places and not programs:
                return result
            self._programs |= programs
            if len(self._programs) > _MAX_PROGRAMS:
                raise LimitExceeded(f"{self._script.name} calls more than {_MAX_PROGRAMS} programs by their paths")

    def _once(self, variables: Mapping[str, str], settings: Mapping[str, Any], arguments: Sequence[str]) -> BashRun:
        """Runs the script once in the sandbox and returns what was recorded; it repeats a run that may not mount /proc.

        `settings` are the answers to what the replaced commands ask, by name.

        Raises:
            LimitExceeded: the time for all runs is over.
            NoSandbox: bubblewrap does not work here; its message.
        """
        if time.monotonic() > self._ends_s:
            raise LimitExceeded(
                f"{self._script.name} needs more runs in bash than fit into {self._limit_s:g} s: what it passes to verl"
                " depends on too many commands, tests or files"
            )
        answers = "".join(f"_ASK_{name}={shlex.quote(str(value))}\n" for name, value in settings.items())
        with new_records() as records:
            run_bash(
                self.visible, answers + _ANSWERS_TEXT, variables, arguments, records, self._ends_s, proc=self._has_proc
            )
            lines = text_of(records.errors).splitlines()
            launches, calls = _read_notes(text_of(records.notes).split("\0")[:-1])
            steps = [*_read_trace(text_of(records.trace))]
        if lines and lines[0].startswith("bwrap: ") and not steps:
            if "proc" in lines[0] and self._has_proc:  # containers often forbid to mount it
                self._has_proc = False
                return self._once(variables, settings, arguments)
            raise NoSandbox(lines[0])
        messages = [(int(match[1]), match[2]) for match in map(_MESSAGE.match, lines) if match]
        return BashRun(launches, calls, steps, messages)


def _read_notes(fields: Sequence[str]) -> tuple[list[tuple[int, list[str]]], list[str]]:
    """Parses the fields that `answers.bash` wrote into (commands that start verl, replaced commands as LINE@NAME).

    Each note has a kind, the line, the number of words, and these words. The first note of another form ends them.
    """
    launches: list[tuple[int, list[str]]] = []
    calls: list[str] = []
    rest = iter(fields)
    for kind in rest:
        line = next(rest, "")
        num_words = next(rest, "")
        if not _NUMBER.fullmatch(line) or not _NUMBER.fullmatch(num_words):
            break
        words = [*islice(rest, int(num_words))]
        if len(words) < int(num_words):
            break
        if kind == "launch":
            launches.append((int(line), words))
        elif words:
            calls.append(f"{int(line)}@{words[0]}")
    return launches, calls


def _read_trace(text: str) -> Iterator[Step]:
    """Yields the commands of a trace; PS4 in answers.bash says how bash separates them and their parts."""
    entries = [entry.split("\x1f", 3) for entry in re.split("\x1e+", text)]
    for file, line, folder, command in (fields for fields in entries if len(fields) == 4):  # the last may be cut off
        if file and file != ANSWERS and _NUMBER.fullmatch(line) and not command.startswith("_ask_is_"):
            yield Step(file, int(line), folder, command.rstrip("\n"))


def _programs_of(steps: Sequence[Step]) -> set[str]:
    """Returns the programs, shell scripts aside, that the commands call by a path, such as ./tool."""
    return {
        word
        for word in (step.name for step in steps)
        if re.fullmatch(r"[\w./~+-]{0,200}/[\w.+-]{1,200}", word, re.ASCII) and not word.endswith(".sh")
    }
