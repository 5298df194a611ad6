"""Finds the arguments that a launch script passes to `verl.trainer.main_ppo`, without training anything.

Bash runs the script in a sandbox. A script depends on variables, and on commands that cannot be run there. Further runs
with other variables and results show on which of them the arguments depend.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from controller.from_verl.shell.bash import Bash, BashRun
from rewards.code.bubblewrap import NoSandbox
from splitppo.config import ConfigError

_CALL = re.compile(r"@@(\d+)@([^@\s]*)@@")
_UNBOUND = re.compile(r"\$?(\w+): unbound variable")
_SIMPLE_TESTS = ("[", "[[", "test")
_TESTS = (*_SIMPLE_TESTS, "_ask_tested", "((")
_MAX_TESTS = 8  # nested in each other
# Variables of the environment that change bash and the linker; the script does not get them.
_OF_BASH = re.compile(r"BASH.*|PATH|PS4|PWD|OLDPWD|SHLVL|SHELLOPTS|POSIXLY_CORRECT|LD_.*|LC_.*|LANG|_")


@dataclass(frozen=True)
class Word:
    """One argument that a launch script passes to verl, for example data.train_batch_size=64.

    Attributes:
        line: the line of the script with this argument; 0 if the argument is not from a script.
        unknown: the reason why the rest of the text is not known; "" if all of the text is known.
    """

    text: str
    line: int
    unknown: str = ""


@dataclass(frozen=True)
class Launch:
    """The arguments that a script passes to verl, and the environment variables that these arguments depend on."""

    words: list[Word]
    from_environment: Collection[str]


def read_script(file: Path, text: str, environment: Mapping[str, str], now: datetime) -> Launch:
    """Runs a launch script in a sandbox and returns the arguments that the script passes to `verl.trainer.main_ppo`.

    The script itself gets no arguments.

    Raises:
        ConfigError: bash cannot run here, the script does not start verl or starts two runs, or a branch depends on
            a command that cannot be run.
    """
    try:
        return _Reader(file, text, environment, now).launch()
    except NoSandbox as error:
        raise ConfigError(
            f"bash cannot run {file.name} here: {error} (docs/deployment.md says what it needs); without it, paste the"
            " arguments of main_ppo: python -m controller from-verl - key=value ..."
        ) from error


class _Reader:
    """Runs one launch script several times with different variables and results, and finds its arguments for verl."""

    def __init__(self, file: Path, text: str, environment: Mapping[str, str], now: datetime) -> None:
        self._file, self._text = file, text
        self._environment = {name: value for name, value in environment.items() if not _OF_BASH.fullmatch(name)}
        self._bash = Bash(file, int(now.timestamp()))
        self._words: list[str] = []

    def launch(self) -> Launch:
        run = self._bash.run(self._environment)
        self._check(run)
        line, self._words = run.launches[0]
        self._check_tests(run)
        self._check_calls(run.calls)
        unset = self._unset()
        own = [Word("", line, why) for word, why in unset.items() if not word]
        words = [self._word(word, line, unset.get(word, "")) for word in self._words]
        names = _having_effect([*self._environment], lambda group: _words(self._with_marks(group)), self._words)
        return Launch([*words, *own], names)

    def _word(self, word: str, line: int, unset: str) -> Word:
        key = _key(word)
        here = re.compile(rf"(?<![\w.]){re.escape(key)}=")
        line = next((number for number, text in enumerate(self._text.splitlines(), 1) if here.search(text)), line)
        if call := _CALL.search(word):
            return Word(word[: call.start()], line, _why(call))
        return Word(f"{key}=" if unset else word, line, unset)

    def _check(self, run: BashRun) -> None:
        """Checks that the script starts one verl run, and that bash evaluated no unknown value; else ConfigError."""
        for line, message in run.messages:
            if (call := _CALL.search(message)) and message.split(":")[0] not in _TESTS:
                raise self._mistake(line, f"a value is not known, as {_why(call)}")
        if not run.launches:
            raise self._no_launch(run)
        lines = [line for line, _ in run.launches]
        if any(words != run.launches[0][1] for _, words in run.launches):
            raise self._mistake(lines[1], f"a second run, after that of line {lines[0]}: keep one of them")

    def _no_launch(self, run: BashRun) -> ConfigError:
        if run.messages:
            line, message = run.messages[-1]
            unbound = _UNBOUND.fullmatch(message)
            why = f"{_unset(unbound[1])}; {_how_to_set(unbound[1])}" if unbound else f"bash says {message}"
            return self._mistake(line, why)
        last = run.steps[-1] if run.steps else None
        ended = f" before it ends in line {last.line}" if last and last.text.startswith("exit") else ""
        return ConfigError(
            f"{self._file.name} starts no verl.trainer.main_ppo{ended}; expected python -m verl.trainer.main_ppo"
        )

    def _mistake(self, line: int | str, sentence: str) -> ConfigError:
        return ConfigError(f"{self._file.name}, line {line}: {sentence}")

    def _check_tests(self, run: BashRun, passed: Sequence[int] = ()) -> None:
        """Checks that the arguments for verl depend on no test of an unknown value; else ConfigError.

        A mark stands for the unknown value, and a test of a mark fails. If the test succeeded, the script would have to
        pass the same arguments, or not to start verl.
        """
        for step in run.steps:
            call = _CALL.search(step.text)
            if call and step.name in _TESTS and step.line not in passed:
                lines = [*passed, step.line]
                other = self._bash.run(self._environment, passed=lines)
                holds_already = [s for s in run.steps if s.line != step.line or s.name not in _TESTS] == other.steps
                can_be_passed = step.name in _SIMPLE_TESTS and not holds_already and len(lines) <= _MAX_TESTS
                if not can_be_passed or _words(other) not in (None, self._words):
                    raise self._mistake(step.line, f"which branch is taken is not known, as {_why(call)}")
                self._check_tests(other, lines)

    def _check_calls(self, calls: Sequence[str]) -> None:
        """Checks that the arguments for verl stay the same if a replaced command fails; else ConfigError."""
        keys = {_key(word) for word in self._words if not _CALL.search(word)}

        def with_failing(group: Sequence[str]) -> list[str] | None:
            words = _words(self._bash.run(self._environment, group))
            return None if words is None else [word for word in words if _key(word) in keys]

        before = [word for word in self._words if _key(word) in keys]
        for call in _having_effect([*dict.fromkeys(calls)], with_failing, before):
            line, name = call.split("@")
            why = f"what is passed depends on whether {name} succeeds, which would have to be run"
            raise self._mistake(line, why)

    def _unset(self) -> dict[str, str]:
        """Returns the words for verl that contain an unset variable or argument, as bash expands them, and why."""
        reasons: dict[str, str] = {}
        for name in self._read_unset():
            mark = f"@@{name}@@"
            run = self._with_marks([name])
            for line, message in run.messages:
                if mark in message:
                    raise self._mistake(line, f"a value is not known, as {_unset(name)}")
            for word in _words(run) or []:
                if mark in word and (empty := word.replace(mark, "")) in ("", *self._words):
                    reasons[empty] = _unset(name)
        return reasons

    def _read_unset(self) -> list[str]:
        """Finds the variables and arguments that the script reads and nobody has set, in order of use."""
        names: list[str] = []
        while True:
            run = self._run_with(dict.fromkeys(names, ""), strict=True)
            unbound = {match[1] for _, message in run.messages if (match := _UNBOUND.fullmatch(message))}
            if unbound <= {*names}:
                return names
            names += sorted(unbound - {*names})

    def _with_marks(self, names: Sequence[str]) -> BashRun:
        return self._run_with({name: f"@@{name}@@" for name in names})

    def _run_with(self, values: Mapping[str, str], *, strict: bool = False) -> BashRun:
        """Runs the script with these values of variables; names that are numbers are arguments of the script."""
        variables = {name: value for name, value in values.items() if not name.isdigit()}
        last = max([0, *(int(name) for name in values if name.isdigit())])
        arguments = [values.get(str(place), "") for place in range(1, last + 1)]
        return self._bash.run(self._environment | variables, arguments=arguments, strict=strict)


def _having_effect(
    names: Sequence[str], words_with: Callable[[Sequence[str]], list[str] | None], before: Sequence[str]
) -> list[str]:
    """Finds by bisection the names (variables or commands) that change the arguments that the script passes to verl."""
    words = words_with(names) if names else before
    if words == before or (words is None and len(names) == 1):
        return []
    if len(names) == 1:
        return [*names]
    half = len(names) // 2
    return [name for part in (names[:half], names[half:]) for name in _having_effect(part, words_with, before)]


def _words(run: BashRun) -> list[str] | None:
    return run.launches[0][1] if run.launches else None


def _unset(name: str) -> str:
    return f"the script's argument {name} is not given" if name.isdigit() else f"{name} is set nowhere"


def _how_to_set(name: str) -> str:
    return "write `set -- ...` into the script's first line" if name.isdigit() else "set it in the environment"


def _key(word: str) -> str:
    return word.partition("=")[0]


def _why(call: re.Match[str]) -> str:
    return f"{call[2]} in line {call[1]} would have to be run"
