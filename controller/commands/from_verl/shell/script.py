"""Finds the arguments that a launch script passes to `verl.trainer.main_ppo`, without training anything.

Bash runs the script in a sandbox. A script depends on variables, and on commands that cannot be run there. Further runs
with other variables and results show on which of them the arguments depend.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from controller.commands.from_verl.shell.bash import LIMIT_S, Bash, BashRun
from controller.commands.from_verl.shell.visible import LimitExceeded, is_of_scripts
from rewards.code.bubblewrap import NoSandbox
from splitppo.config import ConfigError
from splitppo.our_commands import our_command

_CALL = re.compile(r"@@(\d+)@([^@\s]*)@@")
_UNBOUND = re.compile(r"\$?(\w+): unbound variable")
_SIMPLE_TESTS = ("[", "[[", "test")
_TESTS = (*_SIMPLE_TESTS, "_ask_tested", "((")
_MAX_TESTS = 8  # nested in each other
# A variable or an argument that a script may read.
_NAME = re.compile("[1-9][0-9]?|[A-Za-z_][A-Za-z0-9_]{0,99}")
_MAX_UNSET = 500
# How verl itself says what it was given, without running anything.
HOW_TO_RESOLVE = (
    "give verl's own configuration instead: where verl is installed, add --cfg job --resolve to the arguments of"
    " main_ppo (often: bash {script} --cfg job --resolve > resolved.yaml), then"
    f" {our_command('controller', 'from-verl', 'resolved.yaml')}"
)


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
    """The arguments that a script passes to verl, and what of this machine these arguments depend on.

    Attributes:
        from_environment: the environment variables that the arguments depend on.
        unread: the files of this machine that the script would run, and that were not read.
    """

    words: list[Word]
    from_environment: Collection[str]
    unread: Collection[str] = ()


def read_script(
    file: Path, text: str, environment: Mapping[str, str], now: datetime, *, limit_s: float = LIMIT_S
) -> Launch:
    """Runs a launch script in a sandbox and returns the arguments that the script passes to `verl.trainer.main_ppo`.

    The script itself gets no arguments. All its runs together take at most `limit_s` seconds.

    Raises:
        ConfigError: bash cannot run here, the script exceeds a limit, does not start verl or starts two runs, or a
            branch depends on a command that cannot be run.
    """
    try:
        return _Reader(file, text, environment, Bash(file, text, int(now.timestamp()), limit_s)).launch()
    except NoSandbox as error:
        raise ConfigError(
            f"bash cannot run {file.name} here: {error} (docs/deployment.md says what it needs);"
            f" {HOW_TO_RESOLVE.format(script=file.name)}"
        ) from error
    except LimitExceeded as error:
        raise ConfigError(f"{error}; {HOW_TO_RESOLVE.format(script=file.name)}") from error


class _Reader:
    """Runs one launch script several times with different variables and results, and finds its arguments for verl."""

    def __init__(self, file: Path, text: str, environment: Mapping[str, str], bash: Bash) -> None:
        self._file = file
        self._text = text
        self._environment = environment
        self._bash = bash
        self._words: list[str] = []
        self._passing: dict[frozenset[int], BashRun] = {}  # by the lines whose tests were made to succeed

    def launch(self) -> Launch:
        """Returns the arguments for verl, and the variables that they depend on; see `read_script` for the errors.

        The first run is the one that counts. Further runs, with other results and without variables, show what changes
        the arguments; they need `_words`, the arguments of the first one.
        """
        run = self._bash.run(self._environment)
        self._check(run)
        line, self._words = run.launches[0]
        self._check_tests(run)
        self._check_calls(run.calls)
        unset = self._unset()
        own = [Word("", line, why) for word, why in unset.items() if not word]
        words = [self._word(word, line, unset.get(word, "")) for word in self._words]
        visible = self._bash.visible
        named = [*visible.variables(self._environment)]
        names = _having_effect(named, lambda group: _words(self._with_marks(group)), self._words)
        return Launch([*words, *own], names, [*visible.unread])

    def _word(self, word: str, line: int, unset: str) -> Word:
        """Returns an argument for verl as KEY=VALUE, with the line that has the key, or `line` if none has it.

        What depends on a command that was not run, or on a variable that is not set (`unset` says why), has no value.
        """
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
        """Returns the error for a script that started no verl: bash's last message, else where the script ended."""
        if run.messages:
            line, message = run.messages[-1]
            unbound = _UNBOUND.fullmatch(message)
            why = f"{_unset(unbound[1])}; {_how_to_set(unbound[1])}" if unbound else f"bash says {message}"
            return self._mistake(line, why)
        last = run.steps[-1] if run.steps else None
        ended = f" before it ends in line {last.line}" if last and last.text.startswith("exit") else ""
        unread = ", ".join(self._bash.visible.unread)
        not_read = f" (not read: {unread}; only shell files in its folder are)" if unread else ""
        return ConfigError(
            f"{self._file.name} starts no verl.trainer.main_ppo{ended}{not_read}; expected python -m"
            " verl.trainer.main_ppo"
        )

    def _mistake(self, line: int | str, sentence: str) -> ConfigError:
        return ConfigError(f"{self._file.name}, line {line}: {sentence}")

    def _check_tests(self, run: BashRun, passed: frozenset[int] = frozenset()) -> None:
        """Checks that the arguments for verl depend on no test of an unknown value; else ConfigError.

        A mark stands for the unknown value, and a test of a mark fails. If the test succeeded, the script would have to
        pass the same arguments, or not to start verl. Each set of tests is made to succeed once.
        """
        tests: dict[tuple[int, str], str] = {}
        for step in run.steps:
            if step.name in _TESTS and step.line not in passed and (reason := _why_branch(step.text)):
                tests.setdefault((step.line, step.name), reason)
        for (line, name), reason in tests.items():
            lines = passed | {line}
            is_new = lines not in self._passing
            if is_new:
                self._passing[lines] = self._bash.run(self._environment, passed=sorted(lines))
            other = self._passing[lines]
            besides_test = [step for step in run.steps if step.line != line or step.name not in _TESTS]
            # Nothing else is run if the test is made to succeed: it has succeeded without that.
            holds_already = besides_test == other.steps
            can_be_passed = name in _SIMPLE_TESTS and not holds_already and len(lines) <= _MAX_TESTS
            if not can_be_passed or _words(other) not in (None, self._words):
                raise self._mistake(line, f"which branch is taken is not known, as {reason}")
            if is_new:
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
            matches = [_UNBOUND.fullmatch(message) for _, message in run.messages]
            unbound = {match[1] for match in matches if match}
            new = sorted(name for name in unbound - {*names} if _NAME.fullmatch(name) and is_of_scripts(name))
            if not new:
                return names
            names += new
            if len(names) > _MAX_UNSET:
                raise LimitExceeded(f"{self._file.name} reads more than {_MAX_UNSET} variables that are set nowhere")

    def _with_marks(self, names: Sequence[str]) -> BashRun:
        return self._run_with({name: f"@@{name}@@" for name in names})

    def _run_with(self, values: Mapping[str, str], *, strict: bool = False) -> BashRun:
        """Runs the script with these values of variables; names that are numbers are arguments of the script."""
        variables = {name: value for name, value in values.items() if not name.isdigit()}
        last = max([0, *(int(name) for name in values if name.isdigit())])
        arguments = [values.get(str(place), "") for place in range(1, last + 1)]
        return self._bash.run(self._environment, arguments=arguments, given=variables, strict=strict)


def _having_effect(
    names: Sequence[str], words_with: Callable[[Sequence[str]], list[str] | None], before: Sequence[str]
) -> list[str]:
    """Finds by bisection the names (variables or commands) that change the arguments that the script passes to verl."""
    words = words_with(names) if names else before
    if words == before or (words is None and len(names) == 1):  # by this name alone verl is not started: no argument
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
    """Returns the reason why a value is not known, from the mark in it: a secret, a file, or a command."""
    line, name = call.groups()
    if name.startswith("$"):
        return f"{name[1:]} looks like a secret, whose value no script gets"
    return f"{name} is not read" if line == "0" else f"{name} in line {line} would have to be run"


def _why_branch(text: str) -> str:
    """Returns the reason why the result of a test is not known; "" if it is.

    A secret is there, and equal to nothing that a script has: its test has the result that it would have.
    """
    calls = [call for call in _CALL.finditer(text) if not call[2].startswith("$")]
    return _why(calls[0]) if calls else ""
