"""Sizes of the parts of a streamed generation: each part's share of the responses, and of the tokens, of a step."""

from itertools import pairwise

from splitppo.balance import part_ends
from splitppo.config import Config

# The number of responses of a planned step; with so many, rounding does not matter.
_MANY = 1 << 20


def part_shares(num_parts: int, response_share: float = 0.0) -> list[float]:
    """Returns the share of a step's tokens in each part of a streamed generation; the first parts have short responses.

        share of tokens = share of responses x (1 - response_share + response_share x (before + up_to))

    `before` and `up_to` are the shares of the responses before a part and up to its end, which `part_ends` gives for a
    large number of responses. Lengths of responses are taken to be spread evenly from 0 to the longest.
    `response_share` is the share of response tokens in all tokens of a step; with 0 the result is the share of the
    responses in each part.
    """
    ends = [end / _MANY for end in (0, *part_ends(_MANY, num_parts))]
    return [
        (up_to - before) * (1.0 - response_share + response_share * (before + up_to))
        for before, up_to in pairwise(ends)
    ]


def response_share(config: Config) -> float:
    """Estimates the share of response tokens in all tokens of a step.

    Prompts are taken to have data.max_prompt_length tokens, and responses half of data.max_response_length, in which
    replies and contexts of conversations count.
    """
    prompt = config.data.max_prompt_length
    response = config.data.max_response_length / 2
    return response / (prompt + response)
