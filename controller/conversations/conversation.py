"""Describes what happened in one conversation of the policy with its environment, beside the tokens of the response."""

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from controller.data.prompt_files import PromptRow
from controller.ppo.scores import Objects, Scores
from rewards.samples import Scored
from splitppo.batch import Batch, Column
from splitppo.config.subsections.multi_turn import MultiTurnConfig
from splitppo.segments import context_tokens, num_contexts

log = logging.getLogger(__name__)

_WORTH_A_LINE = 0.1  # of the time of a step
_COUNTS = ("num_bad_calls", "num_tool_errors", "num_timeouts", "num_crashes", "num_overlapping")


class EnvironmentsFailed(Exception):
    """Environments failed for too many conversations; the message is one sentence."""


class LastContext(NamedTuple):
    """The chat messages of a context: those by which it began, in the place of a prompt, and those after them."""

    beginning: Sequence[Mapping[str, Any]]
    following: Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Conversation:
    """The facts about one conversation that is over.

    Attributes:
        turn_rewards: the rewards that the environment gave for the policy's turns, one number per turn.
        turn_ends: for each turn, the index of its last token in the response.
        end_score: the score that the environment gave at the end, for the whole conversation.
        extra: further fields from the environment, which become metrics like those of scorers.
        messages: the chat messages after the prompt, those of the policy included; one with "begins_context" is the
            first of a context that began anew, after which the policy saw nothing that was before.
        num_calls: the calls of tools that were read in the policy's turns; of these, `num_bad_calls` were wrong,
            `num_tool_errors` raised, `num_timeouts` took too long; `num_crashes` of those that raised ended their
            process.
        num_overlapping: the requests of an agent that came before those before them were answered.
        tool_error: the first failure of a tool, as "name: message"; empty if none failed.
        agent_error: why an agent failed after an answer of the policy, which may be the cause; empty if none did.
        last_turn: the policy's last turn as text, calls of tools included.
        is_truncated: True if the conversation did not fit into the response.
        lost: why the environment failed, as a sentence; empty if it did not fail.
        beginning: the text by which the environment began, which the prompt ends with.
        own_prompt: the messages of the context by which the environment began, in the place of the row's prompt; empty
            if it began with none.
        last_beginning: the tokens of the response, and the messages, up to the end of those by which its last context
            began; (0, 0): it has one context.
        num_returned: how many of the later contexts go back to an earlier turn.
        ended_by: what ended the conversation: "environment"; "turns", the largest number of turns; "length", no room.
        is_rewarded: True if the environment gave a reward or a score, also one of 0.
        privileged: what the environment named for the critic alone, as texts by name.
    """

    turn_rewards: Sequence[float] = ()
    turn_ends: Sequence[int] = ()
    end_score: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)
    messages: Sequence[Mapping[str, Any]] = ()
    num_calls: int = 0
    num_bad_calls: int = 0
    num_tool_errors: int = 0
    num_timeouts: int = 0
    num_crashes: int = 0
    num_overlapping: int = 0
    tool_error: str = ""
    agent_error: str = ""
    last_turn: str = ""
    is_truncated: bool = False
    lost: str = ""
    beginning: str = ""
    own_prompt: Sequence[Mapping[str, Any]] = ()
    last_beginning: Sequence[int] = (0, 0)
    num_returned: int = 0
    ended_by: str = "environment"
    is_rewarded: bool = True
    privileged: Mapping[str, str] = field(default_factory=dict)

    def row_as_begun(self, row: PromptRow) -> PromptRow:
        """Returns a data row with the prompt that this conversation had."""
        prompt = [dict(message) for message in self.own_prompt] or row.prompt
        return replace(row, prompt=prompt, observation=self.beginning)

    @property
    def last_context(self) -> "LastContext | None":
        """The messages of the last context; None if it is that of the row's prompt."""
        _, end = self.last_beginning
        if not end:
            return LastContext(self.own_prompt, self.messages) if self.own_prompt else None
        begin = max(place for place in range(end) if self.messages[place].get("begins_context"))
        first = {name: value for name, value in self.messages[begin].items() if name != "begins_context"}
        return LastContext((first, *self.messages[begin + 1 : end]), self.messages[end:])

    @property
    def num_turns(self) -> int:
        """The number of the policy's turns."""
        return len(self.turn_ends)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields that a scorer gets in `extra_info` beside those of the data row."""
        return {
            "num_turns": self.num_turns,
            "turn_scores": list(self.turn_rewards),
            "messages": list(self.messages),
            "ended_by": self.ended_by,
        }

    def added_to(self, scored: Scored, num_tokens: int) -> Scored:
        """Adds the environment's rewards to the scores of the scorers; a lost conversation scores 0.

        `num_tokens` is the number of tokens of the response. A reward for a turn belongs to the last token of the turn.
        """
        if self.lost:
            return Scored(0.0)
        tokens = np.zeros(num_tokens)
        if scored.token_scores:
            tokens += scored.token_scores
        np.add.at(tokens, list(self.turn_ends), list(self.turn_rewards))
        return replace(
            scored,
            score=scored.score + self.end_score,
            token_scores=tokens.tolist() if tokens.any() else scored.token_scores,
            extra={**self.extra, **scored.extra},
        )


def mask_lost(rollouts: Batch, conversations: Sequence[Conversation]) -> Batch:
    """Clears the column `response_mask` of lost conversations, from which nothing is learned."""
    if "response_mask" not in rollouts or not any(one.lost for one in conversations):
        return rollouts
    mask = rollouts["response_mask"]
    kept_B = np.array([not one.lost for one in conversations], mask.values.dtype)
    masked = Column(mask.values * np.repeat(kept_B, mask.lengths), mask.lengths)
    return rollouts.merge(Batch(rollouts.num_rows, {"response_mask": masked}))


def without_lost(scores: Scores) -> Scores:
    """Sets the scores of lost conversations to 0, also what a reward model or a penalty has added."""
    is_kept_B = np.array([one is None or not one.lost for one in scores.conversations], np.bool_)
    return scores if is_kept_B.all() else replace(scores, scores=np.where(is_kept_B, scores.scores, np.float32(0.0)))


def check_lost(scores: Scores, config: MultiTurnConfig, whose: str) -> None:
    """Checks that environments failed for no larger share of responses than `max_error_rate` allows.

    Logs the first failure, and that of a tool if so large a share of the calls failed. `whose` names the responses,
    e.g. "step 3".

    Raises:
        EnvironmentsFailed: environments failed for more responses, or every agent has failed.
    """
    _check_agents(scores, config, whose)
    max_error_rate = config.max_error_rate
    talks = [(place, one) for place, one in zip(scores.places, scores.conversations, strict=True) if one is not None]
    num_calls = sum(one.num_calls for _, one in talks)
    if (num_failed := sum(one.num_tool_errors + one.num_timeouts for _, one in talks)) > max_error_rate * num_calls:
        place, why = next((place, one.tool_error) for place, one in talks if one.tool_error)
        log.warning("tools failed in %d of %d calls of %s; first %s: %s", num_failed, num_calls, whose, place, why)
    lost = [(place, one.lost) for place, one in talks if one.lost]
    if not lost:
        return
    place, why = lost[0]
    what = f"the environment failed in {len(lost)} of {scores.num_rows} conversations of {whose}"
    if len(lost) > max_error_rate * scores.num_rows:
        allowed = f"rollout.multi_turn.max_error_rate ({max_error_rate:g})"
        raise EnvironmentsFailed(f"{what}, more than {allowed} allows; first {place}: {why}")
    log.warning("%s; first %s: %s", what, place, why)


def _check_agents(scores: Scores, config: MultiTurnConfig, whose: str) -> None:
    """Logs how many agents failed after an answer of the policy.

    Raises:
        EnvironmentsFailed: all of them did; it is not the policy that a missing package, for instance, comes from.
    """

    def is_of_agent(source: str) -> bool:
        environment = config.environment_of(source)
        return environment is not None and environment.is_agent

    talks = zip(scores.places, scores.data_sources, scores.conversations, strict=True)
    agents = [(place, one) for place, source, one in talks if one is not None and is_of_agent(source) and not one.lost]
    failed = [(place, one.agent_error) for place, one in agents if one.agent_error]
    if not failed:
        return
    place, why = failed[0]
    what = (
        f"{len(failed)} of {len(agents)} agents of {whose} failed after an answer of the policy; first {place}: {why}"
    )
    if len(failed) == len(agents):
        raise EnvironmentsFailed(what)
    log.warning("%s", what)


def warn_of_no_rewards(scores: Scores, others: Collection[str], whose: str) -> None:
    """Warns if no environment of a data source gave a reward, so that nothing can be learned from its responses.

    `others` are the data sources that have scores from elsewhere; `whose` names the responses, e.g. "step 3".
    """
    pairs = list(zip(scores.data_sources, scores.conversations, strict=True))
    rewarded = {source for source, talk in pairs if talk is not None and (talk.is_rewarded or talk.lost)}
    for source in sorted({source for source, talk in pairs if talk is not None} - rewarded - set(others)):
        log.warning(
            "no conversation of data_source %s in %s got a reward, so nothing is learned from it: its environment gave"
            " none, neither for a turn nor at the end (get_reward; of an agent, what it returns, prints or posts), and"
            " no scorer scores it (reward.scorers)",
            source,
            whose,
        )


def conversation_metrics(
    conversations: Objects, response_mask: Column | None = None, segments: Column | None = None
) -> dict[str, float]:
    """Computes num_turns/..., tool_call_counts/... and environment/... of rows with a conversation; {} if none has one.

    With `response_mask`, also the number of sampled tokens of a response, response_length/sampled/.... With `segments`,
    also the number of contexts, num_contexts/..., and of the tokens of later ones, response_length/contexts/....
    """
    own = [one for one in conversations if one is not None]
    if not own:
        return {}
    numbers = {"num_turns": [one.num_turns for one in own], "tool_call_counts": [one.num_calls for one in own]}
    if response_mask is not None:
        numbers["response_length/sampled"] = response_mask.sums().tolist()
    if segments is not None:
        numbers["num_contexts"] = num_contexts(segments).tolist()
        numbers["response_length/contexts"] = context_tokens(segments).tolist()
    metrics: dict[str, float] = {}
    for name, values in numbers.items():
        metrics |= {f"{name}/mean": float(np.mean(values))}
        metrics |= {f"{name}/max": float(max(values)), f"{name}/min": float(min(values))}
    if segments is not None:
        metrics["num_contexts/returned"] = float(sum(one.num_returned for one in own))
    metrics |= {f"environment/{name}": float(sum(getattr(one, name) for one in own)) for name in _COUNTS}
    metrics["environment/num_agent_errors"] = float(sum(bool(one.agent_error) for one in own))
    metrics["environment/num_truncated"] = float(sum(one.is_truncated for one in own))
    return metrics | {"environment/num_lost": float(sum(bool(one.lost) for one in own))}


def waited_for(metrics: Mapping[str, float]) -> str:
    """Returns a sentence on how long a step waited for its environments, and why; empty if it is not worth one.

    It is worth one if a call ended its process or took too long, or from 1 s and a tenth of the step on.
    """
    step_s = metrics.get("timing_s/step", 0.0)
    waited_s = metrics.get("timing_s/wait_replies", metrics.get("timing_s/environment", 0.0))
    numbers = {"ended their process": "environment/num_crashes", "took too long": "environment/num_timeouts"}
    counts = {what: int(metrics.get(name, 0)) for what, name in numbers.items()}
    causes = [f"{count} {'call' if count == 1 else 'calls'} {what}" for what, count in counts.items() if count]
    if not causes and waited_s < max(1.0, _WORTH_A_LINE * step_s):
        return ""
    return f"{waited_s:.3g} of {step_s:.3g} s for environments" + (f": {', '.join(causes)}" if causes else "")
