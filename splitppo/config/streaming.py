"""The parts of a step's responses: their number where `rollout.stream_groups` is `auto`, and what is in them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from splitppo.config.schema import Config

AUTO_PARTS = 6
# No part is larger than so many equal shares: those who compute with the first one begin while most is still to come.
LARGEST_PART = 1.5
# Shorter responses end too close to each other for their parts to hide more than their calls cost (ADR 023).
MIN_RESPONSE_LENGTH = 64


def num_parts(config: "Config") -> int:
    """`rollout.stream_groups` as a number.

    A function of the configuration alone, and not of its schedule, which changes no result.
    """
    if config.rollout.stream_groups != "auto":
        return config.rollout.stream_groups
    num_responses = config.data.train_batch_size * config.rollout.n
    is_whole = config.algorithm.filter_groups.enable  # its groups are chosen once all of them are scored
    pays = not is_whole and len(config.roles) > 1 and config.data.max_response_length >= MIN_RESPONSE_LENGTH
    return min(AUTO_PARTS, num_responses) if pays else 1


def part_shares(num_parts: int) -> list[float]:
    """The share of the responses in each part: half of what those before have left, at most LARGEST_PART equal shares.

    The last one has the rest.
    """
    shares: list[float] = []
    for _ in range(num_parts - 1):
        shares.append(min((1.0 - sum(shares)) / 2.0, LARGEST_PART / num_parts))
    return [*shares, 1.0 - sum(shares)]


def part_work_shares(num_parts: int, response_share: float) -> list[float]:
    """The share of a step's tokens in each part: what comes first is short.

        share of tokens = share of responses x (1 - response_share + response_share x (before + up to it))

    with the shares of the responses before a part and up to its end: as if their lengths were spread evenly, from
    nothing to the longest. `response_share` is the share of response tokens in all tokens of a step.
    """
    work, before = [], 0.0
    for share in part_shares(num_parts):
        up_to = before + share
        work.append(share * (1.0 - response_share + response_share * (before + up_to)))
        before = up_to
    return work


def response_share(config: "Config") -> float:
    """The share of response tokens in a step's tokens, where responses are half as long as they may be."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length / 2
    return response / (prompt + response)


def resolve_stream_groups(config: "Config") -> "Config":
    """`config` with a number in place of `auto`."""
    return _with_parts(config, num_parts(config))


def keep_stream_groups(config: "Config", stored: "Config") -> "Config":
    """`config` of a resumed run with the number that it has been using, by its `stored` one, in place of `auto`."""
    return _with_parts(config, stored.rollout.stream_groups)


def _with_parts(config: "Config", num_parts: int | str) -> "Config":
    if config.rollout.stream_groups != "auto":
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"stream_groups": num_parts})})
