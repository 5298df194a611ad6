"""The words that a launch script passes to `verl.trainer.main_ppo`, found by asking bash.

A script depends on variables, and on commands that cannot be run here. What of them the launch depends on is found by
asking again, with other answers.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from controller.from_verl.bash import Bash, BashRun
from rewards.code.bubblewrap import NoSandbox
from splitppo.config import ConfigError

_CALL = re.compile(r"@@(\d+)@([^@\s]*)@@")
_UNBOUND = re.compile(r"\$?(\w+): unbound variable")
_SIMPLE_TESTS = ("[", "[[", "test")
_TESTS = (*_SIMPLE_TESTS, "_ask_tested", "((")
_MAX_TESTS = 8  # within each other
# Of the environment, what bash and the linker obey.
_OF_BASH = re.compile(r"BASH.*|PATH|PS4|PWD|OLDPWD|SHLVL|SHELLOPTS|POSIXLY_CORRECT|LD_.*|LC_.*|LANG|_")


@dataclass(frozen=True)
class Word:
    """One argument, and the line of the script in which it is written; 0: it came from outside.

    Attributes:
        unknown: why the rest of the text is not known; "" where there is no such rest.
    """

    text: str
    line: int
    unknown: str = ""


@dataclass(frozen=True)
class Launch:
    """The words that follow the entry point, and the variables of the environment on which they depend."""

    words: list[Word]
    from_environment: Collection[str]


def read_script(file: Path, text: str, environment: Mapping[str, str], now: datetime) -> Launch:
    """Returns the words that follow `-m verl.trainer.main_ppo` in a script that is given none itself.

    Raises:
        ConfigError: bash cannot be asked here, the script starts no such program, or two, or which branch it takes
            depends on a command that cannot be run.
    """
    try:
        return _Questions(file, text, environment, now).launch()
    except NoSandbox as error:
        raise ConfigError(
            f"{file.name} cannot be given to bash here: {error} (docs/deployment.md says what it takes); without it,"
            " paste what the script passes to main_ppo: python -m controller from-verl - key=value ..."
        ) from error


class _Questions:
    """Asks bash about one script, again and again."""

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
        if found := _CALL.search(word):
            return Word(word[: found.start()], line, _why(found))
        return Word(f"{key}=" if unset else word, line, unset)

    def _check(self, run: BashRun) -> None:
        """Raises ConfigError unless there is one launch, and no number depends on a mark."""
        for line, message in run.messages:
            if (found := _CALL.search(message)) and message.split(":")[0] not in _TESTS:
                raise self._mistake(line, f"a value is not known, as {_why(found)}")
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
        """A test of a mark, which does not hold, must not matter: the same is passed where it holds, or nothing."""
        for step in run.steps:
            found = _CALL.search(step.text)
            if found and step.name in _TESTS and step.line not in passed:
                lines = [*passed, step.line]
                other = self._bash.run(self._environment, passed=lines)
                holds_already = [s for s in run.steps if s.line != step.line or s.name not in _TESTS] == other.steps
                can_be_passed = step.name in _SIMPLE_TESTS and not holds_already and len(lines) <= _MAX_TESTS
                if not can_be_passed or _words(other) not in (None, self._words):
                    raise self._mistake(step.line, f"which branch is taken is not known, as {_why(found)}")
                self._check_tests(other, lines)

    def _check_calls(self, calls: Sequence[str]) -> None:
        """Raises ConfigError if the words depend on whether a command succeeds that does not end the script."""
        known = {_key(word) for word in self._words if not _CALL.search(word)}

        def with_failing(group: Sequence[str]) -> list[str] | None:
            words = _words(self._bash.run(self._environment, group))
            return None if words is None else [word for word in words if _key(word) in known]

        before = [word for word in self._words if _key(word) in known]
        for call in _having_effect([*dict.fromkeys(calls)], with_failing, before):
            line, name = call.split("@")
            why = f"what is passed depends on whether {name} succeeds, which would have to be run"
            raise self._mistake(line, why)

    def _unset(self) -> dict[str, str]:
        """Words in which something that is set nowhere stands, as bash has them, with the reason."""
        found: dict[str, str] = {}
        for name in self._read_unset():
            mark = f"@@{name}@@"
            run = self._with_marks([name])
            for line, message in run.messages:
                if mark in message:
                    raise self._mistake(line, f"a value is not known, as {_unset(name)}")
            for word in _words(run) or []:
                if mark in word and (empty := word.replace(mark, "")) in ("", *self._words):
                    found[empty] = _unset(name)
        return found

    def _read_unset(self) -> list[str]:
        """Returns variables that bash takes as empty, and arguments that are not given, in the order of their use."""
        names: list[str] = []
        while True:
            run = self._run_with(dict.fromkeys(names, ""), strict=True)
            unbound = {found[1] for _, message in run.messages if (found := _UNBOUND.fullmatch(message))}
            if unbound <= {*names}:
                return names
            names += sorted(unbound - {*names})

    def _with_marks(self, names: Sequence[str]) -> BashRun:
        return self._run_with({name: f"@@{name}@@" for name in names})

    def _run_with(self, values: Mapping[str, str], *, strict: bool = False) -> BashRun:
        """Runs the script again, with these values of variables and, by their numbers, arguments."""
        variables = {name: value for name, value in values.items() if not name.isdigit()}
        last = max([0, *(int(name) for name in values if name.isdigit())])
        arguments = [values.get(str(place), "") for place in range(1, last + 1)]
        return self._bash.run(self._environment | variables, arguments=arguments, strict=strict)


def _having_effect(
    names: Sequence[str], words_with: Callable[[Sequence[str]], list[str] | None], before: Sequence[str]
) -> list[str]:
    """Returns the names with which other words are passed, found by halves."""
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


def _why(found: re.Match[str]) -> str:
    return f"{found[2]} in line {found[1]} would have to be run"
