"""The policy whose turns the user types: it samples one response in the way of a worker group."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from controller.commands.play.keyboard import Keyboard, NothingToRead
from controller.commands.play.transcript import Transcript
from controller.data.environment_text import SIGN
from controller.data.tokenizer import Tokenizer
from controller.workers.command import CommandReply
from splitppo.batch import Batch
from splitppo.clock import unix_s
from splitppo.config import Config
from splitppo.v1.actor_pb2 import SamplingParams
from splitppo.v1.batch_pb2 import Slot
from splitppo.v1.conversation_pb2 import Conversation, Turn, TurnLimits, TurnReply, TurnsEnded
from splitppo.v1.worker_pb2 import CommandResult

HELP = """    You are the model. Type its turn, several lines if you like; an empty line ends it, as the model does.
    \\              is an empty line inside of the turn
    /call NAME {}  writes the call of a tool with these arguments (JSON), as the model writes it
    /end           ends the turn here, also with nothing typed
    /cut           ends the turn here as a limit of its length does, without the token that ends a turn
    /tokens        shows the tokens of the present context
    /quit          leaves
    //...          is a line of the turn that begins with /"""
_QUESTION = {"role": "user", "content": "?"}


class Left(Exception):
    """Raised if the user leaves before the conversation is over."""


class TypedTurns:
    """Asks the user for the turns of the model, and makes tokens of what is typed."""

    def __init__(self, keyboard: Keyboard, transcript: Transcript, tokenizer: Tokenizer) -> None:
        self._keyboard = keyboard
        self._transcript = transcript
        self._tokenizer = tokenizer
        self._end = _end_of_turn(tokenizer)

    async def tokens(self, number: int) -> Sequence[int]:
        """Returns the tokens of a turn, at least one, with the one that ends it, if it is ended so.

        Special tokens may be typed; the first one that ends a turn ends this one.

        Raises:
            Left: the user leaves.
        """
        while True:
            text, is_cut = await self._text(number)
            ids = self._ids(text, is_cut)
            if ids:
                return ids
            self._transcript.line("    nothing is typed yet: a turn that is ended so has at least one token")

    def _ids(self, text: str, is_cut: bool) -> Sequence[int]:
        """Returns the tokens of what is typed for a turn; none if nothing is, and no token ends it."""
        ids = self._tokenizer.backend.encode(text, add_special_tokens=False).ids
        ends = [place for place, token in enumerate(ids) if token in self._tokenizer.eos_token_ids]
        if ends:
            return ids[: ends[0] + 1]
        return ids if is_cut else [*ids, *self._end]

    async def _text(self, number: int) -> tuple[str, bool]:
        """Returns what is typed for a turn, and whether it is cut off."""
        lines: list[str] = []
        while True:
            try:
                line = await self._keyboard.line(f"turn {number}> ")
            except NothingToRead:
                if not lines:
                    raise
                line = "/end"
            if line in ("/end", "/cut") or (lines and not line):
                return "\n".join(lines), line == "/cut"
            lines += self._lines_of(line)

    def _lines_of(self, typed: str) -> list[str]:
        """Returns the lines of the turn that a typed line stands for: none if it is a command, which is obeyed.

        Raises:
            Left: the command is to leave.
        """
        command, _, rest = typed.partition(" ")
        match command:
            case "/quit":
                raise Left
            case "/call":
                return self._call(rest)
            case "/tokens":
                self._transcript.tokens()
            case "/help":
                self._transcript.line(HELP)
            case "\\":
                return [""]
            case _ if not typed:
                self._transcript.line("    nothing is typed yet: /end ends an empty turn, /help says more")
            case _ if typed.startswith("//"):
                return [typed.removeprefix("/")]
            case _ if typed.startswith("/"):
                self._transcript.line(f"    {command} is no command: /help names them, // begins a line with /")
            case _:
                return [typed]
        return []

    def _call(self, written: str) -> list[str]:
        """Returns the lines of the call of a tool, as the chat template writes it; none if it cannot be written."""
        name, _, rest = written.strip().partition(" ")
        try:
            arguments = json.loads(rest or "{}")
            if not name or not isinstance(arguments, dict):
                raise ValueError("expected a name, then arguments as a JSON object")
            text = call_text(self._tokenizer, name, arguments)
        except ValueError as error:
            self._transcript.line(f"    /call: {error}")
            return []
        for line in text.split("\n"):
            self._transcript.line(f"    {line}")
        return text.split("\n")


class HandPolicy:
    """The policy that the user plays: one response, whose turns end at the limits at which a worker group ends them."""

    role = "actor"

    def __init__(self, config: Config, tokenizer: Tokenizer, turns: TypedTurns, transcript: Transcript) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._turns = turns
        self._transcript = transcript
        self._num_prompt = 0
        self._response = Batch.from_rows(responses=[[]])
        self._replies: asyncio.Queue[TurnReply] = asyncio.Queue()

    async def put_batch(self, slot: Slot, batch: Batch) -> None:  # noqa: ARG002 - as in ActorClient
        """Takes the prompt of the response."""
        [prompt] = batch["prompts"].rows()
        self._num_prompt = len(prompt)

    async def get_batch(self, slot: Slot, columns: Sequence[str]) -> Batch:  # noqa: ARG002 - as in ActorClient
        """Returns columns of the response, when it is over."""
        return self._response.select(columns)

    async def reply(self, slot: Slot, replies: Sequence[TurnReply]) -> None:  # noqa: ARG002 - as in ActorClient
        """Takes what follows a turn."""
        for reply in replies:
            self._replies.put_nowait(reply)

    async def generate(
        self,
        slot: Slot,  # noqa: ARG002 - as in ActorClient
        sampling: SamplingParams,
        *,
        on_turns: Callable[[TurnsEnded], None],
        base_step: int,
        conversation: Conversation,
        **_: Any,
    ) -> CommandReply:
        """Has the turns typed until the conversation ends, or the response is full."""
        started_s = unix_s()
        said = _Row(self._num_prompt)
        limits = conversation.first_turns[0].limits if conversation.first_turns else TurnLimits()
        for number in range(1, sampling.max_response_length + 1):
            room = said.room(sampling.max_response_length, conversation, limits)
            tokens = self._cut(await self._turns.tokens(number), room, limits.stop)
            said.add(tokens, is_sampled=True)
            is_last = len(said.tokens) == sampling.max_response_length
            log_probs = [0.0] * len(tokens) if conversation.with_log_probs else []
            turn = Turn(place=0, turn=number, tokens=tokens, is_last=is_last, log_probs=log_probs)
            on_turns(TurnsEnded(turns=[turn]))
            reply = None if is_last else await self._replies.get()
            if reply is None or reply.is_last:
                break
            said.add(reply.tokens, is_sampled=False, begins_context=reply.begins_context)
            limits = reply.limits
        self._response = said.columns()
        return CommandReply(CommandResult(policy_version=base_step), started_s, unix_s())

    def _cut(self, tokens: Sequence[int], room: int, stop: Sequence[str]) -> Sequence[int]:
        """Returns a turn up to where a worker group ends it: at a stop text, or where nothing more has room."""
        stops = (*self._config.rollout.stop, *stop)
        lengths = range(1, len(tokens)) if stops else ()
        texts = ((length, self._tokenizer.decode(tokens[:length])) for length in lengths)
        ended = next((length for length, text in texts if any(one in text for one in stops)), len(tokens))
        kept = min(ended, room)
        if kept < len(tokens):
            why = "a stop text ends it there" if kept == ended else "there is room for no more"
            self._transcript.line(f"    [the turn has {kept} of the {len(tokens)} typed tokens: {why}]")
        return tokens[:kept]


class _Row:
    """The tokens of a response so far, with its mask and its later contexts."""

    def __init__(self, num_prompt: int) -> None:
        self.tokens: list[int] = []
        self._mask: list[int] = []
        self._segments: list[int] = []
        self._num_context = num_prompt

    def add(self, tokens: Sequence[int], *, is_sampled: bool, begins_context: bool = False) -> None:
        """Adds tokens of a turn, or of what follows one."""
        if begins_context:
            self._segments += [len(self.tokens), len(tokens)]
            self._num_context = 0
        self.tokens += tokens
        self._mask += [int(is_sampled)] * len(tokens)
        self._num_context += len(tokens)

    def room(self, max_response_length: int, conversation: Conversation, limits: TurnLimits) -> int:
        """Returns the most tokens that the next turn may have."""
        rooms = [max_response_length - len(self.tokens)]
        rooms += [limit for limit in (conversation.max_turn_length, limits.max_tokens) if limit]
        if conversation.max_context_length:
            rooms.append(conversation.max_context_length - self._num_context)
        return min(rooms)

    def columns(self) -> Batch:
        """Returns the columns that a worker group makes."""
        return Batch.from_rows(
            responses=[self.tokens],
            response_mask=[self._mask],
            rollout_log_probs=[[0.0] * len(self.tokens)],
            segments=[self._segments],
        )


def call_text(tokenizer: Tokenizer, name: str, arguments: Mapping[str, Any]) -> str:
    """Returns the call of a tool as the chat template writes it in a turn of the assistant.

    Raises:
        ValueError: the chat template writes no calls.
    """
    call = {"type": "function", "id": "call00000", "function": {"name": name, "arguments": arguments}}
    answer = {"role": "assistant", "content": SIGN, "tool_calls": [call]}
    rendered = tokenizer.chat_template.render([_QUESTION, answer], add_generation_prompt=False)
    if SIGN in rendered:
        after = rendered.rpartition(SIGN)[2]
    else:  # with calls, a turn has no text (Llama)
        after = rendered.removeprefix(tokenizer.chat_template.render([_QUESTION]))
    for token in tokenizer.eos_token_ids:
        after = after.partition(tokenizer.backend.decode([token], skip_special_tokens=False))[0]
    if name not in after or after == rendered:
        raise ValueError("the chat template writes no calls of tools; type the call as the model writes it")
    return after.strip()


def _end_of_turn(tokenizer: Tokenizer) -> Sequence[int]:
    """Returns the token that ends a turn of the assistant, in the chat template if it writes one; () without any."""
    if tokenizer.chat_template.template is not None:
        answer = {"role": "assistant", "content": SIGN}
        try:
            rendered = tokenizer.chat_template.render([_QUESTION, answer], add_generation_prompt=False)
        except ValueError:
            rendered = ""
        ids = tokenizer.backend.encode(rendered.rpartition(SIGN)[2], add_special_tokens=False).ids
        written = [token for token in ids if token in tokenizer.eos_token_ids]
        if written:
            return written[:1]
    return tokenizer.eos_token_ids[:1]
