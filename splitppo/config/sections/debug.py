"""The configuration section `debug`: failpoints, and forced lengths of responses, for tests and benchmarks.

At a failpoint, a named point in the code, a test makes a process die, stop, fail or wait.
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from splitppo.config.section import OneOrMany, PositiveInt, Section
from splitppo.config.subsections.response_lengths import ResponseLengths
from splitppo.config_error import did_you_mean

# Processes, and a point in each of them. A controller learns the phase of a service from its progress events.
_POINTS = (
    ("actor critic", "start"),  # step 0: the rank has read its configuration, and has not joined its group
    ("actor critic", "load"),  # step 0: the rank has joined its group, and is about to load its models
    ("actor critic", "update.begin"),  # an update is about to begin
    ("actor critic", "update"),  # micro-batch boundary of an update
    ("actor critic", "update.mini_batch"),  # between two optimizer steps of an update
    ("actor critic", "update.committed"),  # rank 0: it is in the ledger, no reply is sent; others: their part is done
    ("actor critic", "save_checkpoint.writing"),  # the rank is about to write its shard
    ("actor critic", "save_checkpoint.durable"),  # the part of the role is durable, the reply is not sent
    ("actor rollout", "generate"),  # token boundary of a generation, if this group samples
    ("actor rollout", "generate.part"),  # the rank has handed on its rows of a part of a streamed generation
    ("actor rollout", "generate.turn"),  # the rank has handed on a turn of a conversation
    ("actor rollout", "generate.reply"),  # the rank has taken a reply to a turn of a conversation
    ("actor", "publish_weights.begin"),  # the actor is about to publish its weights
    ("actor", "publish_weights"),  # the rank has handled one more weight
    ("actor", "publish_weights.before_manifest"),  # rank 0: all weights are written, the manifest is not
    ("rollout", "sync_weights.begin"),  # the rollout group is about to load published weights
    ("rollout", "sync_weights"),  # hit 1: the weights are read, the engine does not have them; hit 2: it has
    ("actor", "compute_log_probs"),  # micro-batch boundary of log-probs
    ("actor critic", "compute_ref_log_probs"),  # the same of the reference, in the group that hosts it
    ("actor critic reward", "compute_teacher_log_probs"),  # the same of teachers, in the group that hosts them
    ("critic", "compute_values"),  # micro-batch boundary of values
    ("critic reward", "compute_reward_scores"),  # the same of the reward model's scores, in the group that hosts it
    ("controller.actor controller.critic", "update.begin"),  # the request is about to be sent
    ("controller.actor controller.critic", "update"),  # a progress event of an update has come
    ("controller.actor controller.critic", "update.replied"),  # the reply has come
    ("controller.actor controller.rollout", "generate"),  # a progress event of a generation has come
    ("controller.actor", "publish_weights.replied"),  # the weights are published, and the controller knows it
    ("controller.rollout", "sync_weights.replied"),  # the weights are loaded, and the controller knows it
    ("controller.actor", "compute_log_probs"),  # a progress event of log-probs has come
    ("controller.critic", "compute_values"),  # a progress event of values has come
    ("controller", "save_checkpoint.half"),  # a role's part is durable; hit 1: the other role has not said so
    ("controller", "save_checkpoint.writing"),  # the controller's own part is written, the commit marker is not
)
POINTS = [f"{process}.{point}" for processes, point in _POINTS for process in processes.split()]


def _check_point(point: str) -> str:
    if point not in POINTS:
        hint = did_you_mean(point, POINTS) or f"; known: {', '.join(POINTS)}"
        raise ValueError(f"unknown failpoint {point!r}{hint}")
    return point


Point = Annotated[str, AfterValidator(_check_point)]


class Moment(Section):
    """The event that a failpoint waits for: another process passes a named point in the code in a given step."""

    point: Point
    """The name of the point."""
    step: int = Field(ge=0)
    """The step in whose work the point is passed."""


class Failpoint(Section):
    """An action for tests, e.g. SIGKILL, done once in a run folder when a process reaches a named point in the code."""

    rank: int = Field(0, ge=0)
    """The rank of the group in which the failpoint fires. The controller has rank 0."""

    step: int | None = Field(None, ge=0)
    """The step in whose work the failpoint fires. null: any step."""

    hit: PositiveInt = 1
    """The number of the pass at which the failpoint fires, counted from 1."""

    action: Literal["kill", "stop", "raise", "out_of_memory", "wait"] = "kill"
    """The action. kill, stop: the process sends itself SIGKILL or SIGSTOP. raise: a RuntimeError. out_of_memory: a
    MemoryError. wait: nothing but the wait for `after`."""

    after: Moment | None = None
    """The point of another process that this process waits for, before the action. null: it waits for nothing."""

    def _check_keys(self) -> None:
        if self.action == "wait" and self.after is None:
            raise ValueError("action 'wait' needs after: which point, in which step, another process must have passed")


class DebugConfig(Section):
    """The settings for tests and benchmarks: failpoints and forced lengths of responses.

    The digest that controller and workers compare leaves them out.
    """

    failpoints: dict[Point, Annotated[tuple[Failpoint, ...], OneOrMany]] = Field(default_factory=dict)
    """The failpoints of each point: one, or a list. splitppo/config/sections/debug.py lists all points. Failpoints are
    refused unless every service listens on a loopback address."""

    response_lengths: ResponseLengths | None = None
    """A rule that forces the number of tokens of each response, by its sampling seed, up to max_response_length. No
    token and no text then ends a response earlier. {kind: uniform, low, high}, or {kind: log_normal, median, max,
    sigma}. null: no rule."""
