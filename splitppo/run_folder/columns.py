"""The columns of rollouts/train/N.parquet and rollouts/val/N.parquet: what the run writes, and what readers ask for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# The text of a response as trackers show it; null for responses that they do not show.
SHOWN = "shown"

# number: one per response. text: one per response that is recorded. names: a text that names files, one per such a
# response. tokens: a list with one number per token of such a response, which older steps lose. turns: a list of
# numbers about the turns and contexts of such a response.
Kind = Literal["number", "text", "names", "tokens", "turns"]


@dataclass(frozen=True)
class Columns:
    """Some columns of one kind with one meaning; `in_validations` says which of them the file of a validation has."""

    names: tuple[str, ...]
    kind: Kind
    meaning: str
    in_validations: tuple[str, ...] = ()


def _columns(names: str, kind: Kind, meaning: str, in_validations: str = "") -> Columns:
    return Columns(tuple(names.split()), kind, meaning, tuple(in_validations.split()))


COLUMNS = (
    _columns(
        "row prompt_index sample",
        "number",
        "the place in the step; the row of the prompt in the table of prompts; the number among the samples of the"
        " prompt",
        "row prompt_index sample",
    ),
    _columns(
        "data_source place",
        "number",
        "the data source of the prompt; the file and the row it comes from, counted from 1",
        "data_source place",
    ),
    _columns(
        "score extra failure",
        "number",
        "the score, before the KL in the reward; the other fields of the scorer, as JSON; why there is no score (empty:"
        " there is one)",
        "score extra",
    ),
    _columns("reward", "number", "the sum of the token rewards"),
    _columns(
        "length prompt_length learned",
        "number",
        "tokens of the response, of the prompt, and those that are learned from",
        "length",
    ),
    _columns(
        "has_eos is_truncated",
        "number",
        "it ends by a token that ends responses; it was cut off at the limit",
        "has_eos",
    ),
    _columns(
        "turns contexts lost",
        "number",
        "turns of a conversation (else 1); its contexts, that of the prompt included; its environment failed",
    ),
    _columns(
        "kl k3",
        "number",
        "the mean log-ratio to the reference over the policy's tokens, nats, and Schulman's estimator k3 of the same",
    ),
    _columns(
        "mismatch",
        "number",
        "the mean absolute difference between the log-probs of the trainer and of the rollout backend",
    ),
    _columns(
        "value_first value_last return_first",
        "number",
        "value and return at the policy's first token, value at its last",
    ),
    _columns("value_error", "number", "the root of the mean squared difference between value and return"),
    _columns("advantage_sum", "number", "the sum of the advantages"),
    _columns("entropy", "number", "the mean of `entropy_tokens` over the policy's tokens; null where there are none"),
    _columns("repetition", "number", "the share of pieces of four tokens that the response has had before"),
    _columns("text_hash", "number", "equal for responses of equal tokens"),
    _columns("why", "number", "why the tokens are recorded, as bits; 0: they are not"),
    _columns(
        "fixed",
        "number",
        "of a validation: true for the responses to up to 64 prompts, the same at each; their texts are recorded",
        "fixed",
    ),
    _columns(
        "prompt response ground_truth",
        "text",
        "texts; the response with its special tokens, in a validation without them",
        "prompt response ground_truth",
    ),
    _columns(
        "messages",
        "text",
        "in conversations: the chat messages after the prompt, as JSON",
        "messages",
    ),
    _columns(
        SHOWN,
        "text",
        "of the responses that trackers show: the response as scorers got it, without special tokens",
        SHOWN,
    ),
    _columns(
        "images",
        "names",
        "names of the images in the prompt, in their order, with a space between them: files in `rollouts/images/`",
        "images",
    ),
    _columns(
        "ids ends",
        "tokens",
        "token ids; the characters of `response` up to the end of each token. A character of several tokens belongs to"
        " the last",
    ),
    _columns(
        "old ref rollout",
        "tokens",
        "log-probs under the policy before the update, the reference, the rollout backend. Without `rollout` although"
        " there is such a backend: its log-probs are `old`",
    ),
    _columns(
        "value ret advantage rewards",
        "tokens",
        "of each token; the advantage is the one that the loss gets, whitened if the estimator whitens; return and"
        " advantage are 0 where nothing is learned",
    ),
    _columns(
        "flags", "tokens", "1: the policy sampled the token, and not its environment; 2: it is learned from; 3: both"
    ),
    _columns("version", "tokens", "with rollout.max_step_tokens: the step whose weights have sampled the token"),
    _columns("turn", "tokens", "in conversations: the turn of each token from 1 on (0: the environment's)"),
    _columns(
        "new entropy_tokens",
        "tokens",
        "log-prob and entropy (nats) in the last forward of the update that used the response: under the policy in the"
        " middle of the update. Null where the update used no token of it, in the critic's warm-up, and after the actor"
        " group was lost right after the update",
    ),
    _columns(
        "clip",
        "tokens",
        "the sum of 1 (the clip of PPO cut the ratio `exp(new - old)` off above), 2 (below), 4 (dual clip), by this"
        " forward, 0 where nothing is learned; null with a loss other than `vanilla`, and without `old`",
    ),
    _columns("turn_rewards turn_ends", "turns", "in conversations: reward and last token of each turn"),
    _columns(
        "segments followed_turns",
        "turns",
        "of responses with several contexts: for each later one, the index in the response of its first token, and how"
        " many tokens it has; the earlier turn that it returns to and follows, from 1, or 0 if it begins anew",
    ),
)


def _names(kinds: Iterable[Kind]) -> tuple[str, ...]:
    wanted = {*kinds}
    return tuple(name for columns in COLUMNS if columns.kind in wanted for name in columns.names)


NUMBERS = _names(["number"])
TEXTS = tuple(name for name in _names(["text"]) if name != SHOWN)
NAMES = _names(["names"])
TOKEN_LISTS = _names(["tokens"])
TURN_LISTS = _names(["turns"])
OF_VALIDATIONS = tuple(name for columns in COLUMNS for name in columns.in_validations)
