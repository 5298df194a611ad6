"""The parts of a streamed generation, as shares of the responses and of the tokens of a step."""

from itertools import pairwise

from splitppo.balance import part_ends
from splitppo.config import Config

# Responses of a step that is only planned: shares of so many are as good as exact.
_MANY = 1 << 20


def part_shares(num_parts: int) -> list[float]:
    """Returns the share of the responses in each part, where responses are many; see `part_ends`."""
    return [(end - begin) / _MANY for begin, end in pairwise((0, *part_ends(_MANY, num_parts)))]


def part_work_shares(num_parts: int, response_share: float) -> list[float]:
    """Returns the share of a step's tokens in each part; those that come first are short.

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


def response_share(config: Config) -> float:
    """Returns the share of response tokens in a step's tokens, where responses are half as long as they may be."""
    prompt, response = config.data.max_prompt_length, config.data.max_response_length / 2
    return response / (prompt + response)
