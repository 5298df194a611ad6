"""Records what environments answered, so that a repeated step need not ask environments that are not deterministic.

    episodes/3.jsonl     a line for each conversation of step 3 that is over: {"response", "turns", "answers", "sha256"}

`response` names the response, `turns` are digests, one for each answer: that of turn t is of what the conversation is
about and of turns 1 to t with all that an environment learns of them, so that an answer is used again only for a
conversation that was the same up to it. `sha256` is that of the other fields.

Files of releases before contexts have digests of texts alone, and no field `limits` in their answers. They are found
by digests of texts.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from typing import Any

from environments.messages import Answer, NoRoom, Said, TurnLimits
from splitppo.config_error import ConfigError
from splitppo.run_folder.append_log import AppendLog, object_of

Save = Callable[[Sequence[str], Sequence[Answer]], None]


class Replay:
    """The answers that one response has got, in this or an earlier attempt to sample it, for one attempt.

    `about` is all that the environment knows before the first turn. `save` gets the digests and answers of a
    conversation that is over, unless all of them were known; None: nobody does.
    """

    def __init__(self, known: dict[str, Answer], about: object = None, save: Save | None = None) -> None:
        self._known = known
        self._save = save
        self._digests = [_sha256(about)]
        self._digest_of_texts = self._digests[0]

    def find(self, turns: Sequence[Said | NoRoom | None]) -> Answer | None:
        """Returns the answer to the last of these turns, none or one more than in the call before; None: unknown."""
        for turn in turns[len(self._digests) - 1 :]:
            self._digests.append(_sha256([self._digests[-1], _told(turn)]))
            text = [turn.text, turn.ended_by] if isinstance(turn, Said) else _told(turn)
            self._digest_of_texts = _sha256([self._digest_of_texts, text])
        return self._known.get(self._digests[-1]) or self._known.get(self._digest_of_texts)

    def add(self, answers: Sequence[Answer]) -> None:
        """Takes the answers so far, the last of which was not found."""
        self._known[self._digests[-1]] = answers[-1]
        if answers[-1].is_over and self._save is not None:
            self._save(self._digests, answers)


class Record:
    """The recorded conversations of a run, in one file per step of `folder`, which is made with the first."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def at_step(self, step: int, names: Sequence[str]) -> "RecordedStep":
        """Reads what is recorded of responses, which have names of their own in their step.

        A last line that a crash has cut off is removed. Without names nothing is read or written, and a response that
        is sampled again, because a group was lost, nevertheless gets the answers that it has got.

        Raises:
            ConfigError: another line is damaged; the message names file and line.
        """
        return RecordedStep(self, step, names)

    def remove(self, *, up_to: int = 0, after: float = inf) -> None:
        """Removes the files of steps that are not needed: those up to, or after, a step."""
        for file in self.folder.glob("*.jsonl"):
            if file.stem.isdecimal() and not file.is_dir() and not up_to < int(file.stem) <= after:
                file.unlink(missing_ok=True)


class RecordedStep:
    """The recorded conversations of one step, see `Record.at_step`."""

    def __init__(self, record: Record, step: int, names: Sequence[str]) -> None:
        self._record = record
        self._step = step
        self._names = names
        self._log = AppendLog(record.folder / f"{step}.jsonl")
        self._known: dict[str, dict[str, Answer]] = {}
        self._has_grown = False
        if names and self._log.path.exists():
            end = 0
            for line in self._log.lines():
                self._read(line.content, f"{self._log.path}, line {line.number}")
                end = line.end
            self._log.cut_after(end)

    def replay(self, place: int, about: object = None) -> Replay:
        """Returns what is known of the response at a place, in a conversation about the same."""
        name = self._names[place] if self._names else str(place)

        def save(turns: Sequence[str], answers: Sequence[Answer]) -> None:
            self._append({"response": name, "turns": turns, "answers": [asdict(answer) for answer in answers]})

        return Replay(self._known.setdefault(name, {}), about, save if self._names else None)

    def sync(self) -> None:
        """Waits until all lines are on disk, also those of a start before this one."""
        if self._names and self._log.path.exists():
            self._log.sync()

    def _append(self, line: Mapping[str, Any]) -> None:
        """Appends a conversation. What was recorded of later steps came after other conversations, so it goes."""
        if not self._has_grown:
            self._has_grown = True
            self._log.path.parent.mkdir(exist_ok=True)
            self._record.remove(after=self._step)
        self._log.append(json.dumps({**line, "sha256": _sha256(line)}).encode() + b"\n")

    def _read(self, line: bytes, place: str) -> None:
        """Reads a line of the file of a step into `_known`; ConfigError if it is damaged or was edited.

        Of several answers to the same turn the first one stays.
        """
        try:
            fields = object_of(line, place)
            if fields.pop("sha256", "") != _sha256(fields):
                raise ValueError("it was edited")
            known = self._known.setdefault(fields["response"], {})
            for turn, answer in zip(fields["turns"], fields["answers"], strict=True):
                known.setdefault(turn, _answer(answer))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{place}: expected a recorded conversation, the line is damaged; remove the file, and the step asks"
                " its environments again"
            ) from error


def _told(turn: Said | NoRoom | None) -> object:
    """Returns all that an environment learns of a turn, as JSON has it."""
    return None if turn is None else [type(turn).__name__, asdict(turn)]


def _sha256(content: object) -> str:
    return hashlib.sha256(json.dumps(content, default=str).encode()).hexdigest()


def _answer(fields: dict[str, Any]) -> Answer:
    """Returns a recorded answer; a run folder of an earlier release has no `limits`."""
    limits = TurnLimits(**_with_tuples(fields.get("limits", {})))
    return Answer(**{**_with_tuples(fields), "limits": limits})


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
