"""Runs the command Generate with any rollout backend, and frees the backend's memory before other commands."""

import time
from collections.abc import Callable, Sequence
from typing import NoReturn

import numpy as np
import torch
from google.protobuf.descriptor import ServiceDescriptor
from numpy.typing import NDArray

from services.engine.batching.row_checks import check_rows, has_images
from services.rollout.backends import BACKENDS
from services.rollout.begun_responses import BEGUN_COLUMNS, check_begun, check_cuts
from services.rollout.open_turns import RankTurns
from services.rollout.protocol import PolicyWeights, Response, Sampling
from services.rollout.reply_router import ReplyLimits, ReplyRouter, problem_of_limits
from services.rollout.stopping import load_stop_rule
from services.rollout.streamed_parts import StreamedParts, response_rows
from services.runtime.command import Command, CommandProgress, Effect, Messages, Outcome, Rows, refused_command
from services.runtime.context import RankContext
from services.runtime.ranks.row_group import to_leaders
from splitppo.batch import Batch
from splitppo.images.columns import IMAGE_COLUMNS
from splitppo.v1 import actor_pb2, conversation_pb2


class Generation:
    """The rollout backend of one rank, with the policy whose weights it samples with; built on every rank together.

    Args:
        rest: moves the policy's weights away from the device until the backend needs them again, see `give_back`.
    """

    def __init__(self, context: RankContext, policy: PolicyWeights, *, rest: Callable[[], None] = lambda: None) -> None:
        self._policy = policy
        self._device = context.device
        self._rest = rest
        self._forces_lengths = context.config.debug.response_lengths is not None
        self._stop_rule = load_stop_rule(policy.model, context.config)
        self._backend = BACKENDS[context.config.rollout.backend].build(context, policy, self._stop_rule)

    def command(self, service: ServiceDescriptor | None = None) -> Command:
        """Returns the command Generate, which samples responses for a slot's prompts and seeds.

        `service` declares it; None: the ActorService.
        """
        return Command(
            "Generate",
            actor_pb2.GenerateRequest,
            Effect.WRITES_SLOT,
            self.generate,
            Rows(
                columns=("prompts", "seeds"),
                optional_columns=(*BEGUN_COLUMNS, *IMAGE_COLUMNS),
                prepare=self._prepare,
                shard=lambda batch, num_ranks: deal_prompts(batch, num_ranks, self._backend.ranks_per_engine),
                num_parts=lambda request: request.num_parts,
            ),
            messages=replies(self._open_turns),
            service=service,
        )

    def suspend(self, *, weights_change: bool = False) -> None:
        """Frees the backend's device memory for another command; `weights_change` marks its weights as outdated."""
        self._backend.sleep()
        if weights_change:
            self._backend.policy_version = None

    def give_back(self) -> None:
        """Frees the device memory of backend and policy, because another group computes on this device next."""
        self.suspend()
        self._rest()

    def generate(self, request: actor_pb2.GenerateRequest, batch: Batch, report: CommandProgress) -> Outcome:
        """Samples one response per seed of each prompt on this rank; result rows are ordered by prompt, then seed.

        Responses that have tokens already go on after them.
        With `sleep_after` device memory is given back at the end, also of a generation that was cancelled or failed.
        """
        try:
            return self._sample(request, batch, report)
        finally:
            if request.sleep_after:
                self.give_back()

    def _sample(self, request: actor_pb2.GenerateRequest, batch: Batch, report: CommandProgress) -> Outcome:
        """Samples the rows of this rank, and reports ended parts, turns of conversations and progress meanwhile.

        Weights are brought to the version of the request first. What has ended is reported in order: turns, parts,
        progress.
        """
        version = request.header.base_step
        metrics = self.update_weights(version)
        turns = RankTurns(request, report) if request.HasField("conversation") else None
        have_turns = turns is not None
        parts = StreamedParts(batch, request.num_parts, report, version, have_turns=have_turns)
        ended: list[Response] = []
        sampling = _sampling(request)
        for step in self._backend.generate(batch, sampling, report.is_cancelled, turns):
            if turns is not None:
                turns.announce(step)
            ended += step.ended
            parts.add(step.ended)
            report(step.done, step.total, "generate")
        if turns is not None:
            metrics["timing_s/wait_replies"] = turns.waited_s
        columns = response_rows(ended, batch, have_turns=have_turns, may_go_on=sampling.max_step_tokens > 0)
        return Outcome(columns=columns, metrics=metrics, policy_version=version)

    def update_weights(self, version: int) -> dict[str, float]:
        """Copies the policy's weights to a backend that has other ones; returns the time as timing_s/update_weights."""
        if self._backend.policy_version == version:
            return {}
        started_s = time.perf_counter()
        self._backend.sync_weights(version)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return {"timing_s/update_weights": time.perf_counter() - started_s}

    def _prepare(self, request: actor_pb2.GenerateRequest, batch: Batch) -> Batch:
        """Checks that the rows can be sampled, else ValueError; for streaming and turns adds column `places`."""
        sampling = _sampling(request)
        longest_prompt = int(batch["prompts"].lengths.max(initial=0))
        longest = longest_prompt + sampling.max_response_length
        if request.HasField("conversation"):
            self._check_conversation(request.conversation, longest_prompt)
            longest = min(longest, request.conversation.max_context_length or longest)
        check_rows(batch, self._policy.model, room=longest - longest_prompt)
        self._backend.check_request(sampling, longest)
        per_prompt = np.unique(batch["seeds"].lengths)
        if len(per_prompt) != 1 or per_prompt[0] < 1:
            raise ValueError(f"every prompt needs the same number of seeds, at least 1; got {per_prompt.tolist()}")
        num_samples = int(per_prompt[0])
        num_rows = batch.num_rows * num_samples
        if not 0 <= request.num_parts <= num_rows:
            raise ValueError(f"num_parts must be 0 (not streamed) to {num_rows} responses, got {request.num_parts}")
        self._check_first_turns(request.conversation.first_turns, num_rows)
        check_cuts(request, batch)
        _check_images_end(request, batch)
        check_begun(batch, sampling, self._stop_rule, self._policy.model)
        if request.num_parts <= 1 and not request.HasField("conversation"):
            return batch
        places = np.arange(num_rows).reshape(batch.num_rows, num_samples)
        return batch.merge(Batch.from_rows(places=list(places)))

    def _check_conversation(self, conversation: conversation_pb2.Conversation, longest_prompt: int) -> None:
        """Raises ValueError if a limit is negative, a prompt fills the context, or lengths are forced for a test."""
        for name in ("max_turn_length", "reply_steps", "max_context_length"):
            if (value := getattr(conversation, name)) < 0:
                raise ValueError(f"conversation.{name} must be 0 or positive, got {value}")
        most = conversation.max_context_length
        if 0 < most <= longest_prompt:
            raise ValueError(
                f"conversation.max_context_length ({most}) must be over the longest prompt ({longest_prompt} tokens)"
            )
        if self._forces_lengths:
            raise ValueError("debug.response_lengths forces the lengths of responses, which conversations do not take")

    def _check_first_turns(self, first_turns: Sequence[conversation_pb2.FirstTurn], num_rows: int) -> None:
        """Raises ValueError if limits of first turns are of no response, of one twice, or cannot be kept."""
        places = [first.place for first in first_turns]
        if len(set(places)) < len(places) or not set(places) <= set(range(num_rows)):
            raise ValueError(
                f"conversation.first_turns must name each of the places 0 to {num_rows - 1} at most once, got {places}"
            )
        for first in first_turns:
            problem = problem_of_limits(first.limits, takes_stop_texts=self._backend.takes_stop_texts)
            if problem:
                raise ValueError(f"the first turn of response {first.place}: {problem}")

    def _open_turns(self, request: actor_pb2.GenerateRequest, shares: Sequence[Batch]) -> ReplyRouter:
        """Makes what checks the replies to the turns of a request, whose rows the ranks have."""
        vocab_size = int(self._policy.model.config.get_text_config().vocab_size)
        max_response_length = request.sampling.max_response_length
        limits = ReplyLimits(
            num_token_ids=vocab_size,
            max_response_length=max_response_length,
            max_context_length=request.conversation.max_context_length,
            takes_stop_texts=self._backend.takes_stop_texts,
        )
        return ReplyRouter(limits, [_prompt_lengths(share) for share in shares])


def replies(open_turns: Callable[[actor_pb2.GenerateRequest, Sequence[Batch]], ReplyRouter]) -> Messages:
    """Makes the messages of Generate: turns that have ended, and the replies that callers send by Reply."""
    return Messages(
        "Reply",
        conversation_pb2.ReplyResponse,
        are_exchanged=lambda request: bool(request.HasField("conversation")),
        open=open_turns,
    )


def refused_generate(because: str) -> Command:
    """Makes the command Generate of a group that samples nothing; also no turn of it takes a reply."""

    def never(*_: object) -> NoReturn:
        raise AssertionError("a refused command is never run")

    return refused_command("Generate", actor_pb2.GenerateRequest, because, messages=replies(never))


def deal_prompts(batch: Batch, num_ranks: int, ranks_per_engine: int = 1) -> list[NDArray[np.int64]]:
    """Divides prompts among ranks, longest first, one to each rank in turn; returns the row indices of each rank.

    The length counts the tokens that a response has already. Lengths matter little, because most time goes into new
    tokens. If ranks share an engine, the first of them gets all rows of the engine.
    """
    lengths = batch["prompts"].lengths
    if "begun_responses" in batch:
        lengths = lengths + batch["begun_responses"].lengths
    order = np.argsort(-lengths, kind="stable")
    num_engines = num_ranks // ranks_per_engine
    return to_leaders([np.sort(order[engine::num_engines]) for engine in range(num_engines)], ranks_per_engine)


def _check_images_end(request: actor_pb2.GenerateRequest, batch: Batch) -> None:
    """Raises ValueError if prompts have images, and their responses are conversations, are cut, or go on."""
    if not has_images(batch):
        return
    if request.HasField("conversation"):
        raise ValueError("expected no conversation with images: a prompt with images has responses of one turn")
    begun = [name for name in BEGUN_COLUMNS if name in batch]
    if request.max_step_tokens or begun:
        because = "max_step_tokens" if request.max_step_tokens else " and ".join(begun)
        raise ValueError(f"expected no images with {because}: a response to a prompt with images is sampled at once")


def _prompt_lengths(rows: Batch) -> dict[int, int]:
    """Returns the length of the prompt of each response, by place; `rows` has the column `places`."""
    lengths = np.repeat(rows["prompts"].lengths, rows["places"].lengths)
    return dict(zip(rows["places"].values.tolist(), lengths.tolist(), strict=True))


def _sampling(request: actor_pb2.GenerateRequest) -> Sampling:
    params = request.sampling
    return Sampling(
        params.temperature,
        params.top_p,
        params.top_k,
        params.max_response_length,
        max_step_tokens=request.max_step_tokens,
    )
