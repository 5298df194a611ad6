"""Sizes of the parts of a streamed generation: each part's share of the responses, and of the tokens, of a step."""

from itertools import pairwise

from splitppo.balance import part_ends
from splitppo.config import Config

# The number of responses of a planned step; with so many, rounding does not matter.
_MANY = 1 << 20


def part_shares(num_parts: int) -> list[float]:
    """Returns the share of a step's responses in each part of a streamed generation, 0 to 1.

    `part_ends` divides the responses among the parts; the number of responses is taken to be large.
    """
    return [end - begin for begin, end in _parts(num_parts)]


def _parts(num_parts: int) -> list[tuple[float, float]]:
    """Returns the shares of the responses that have ended before each part, and at its end."""
    return [(begin / _MANY, end / _MANY) for begin, end in pairwise((0, *part_ends(_MANY, num_parts)))]


def part_work_shares(num_parts: int, response_share: float) -> list[float]:
    """Returns the share of a step's tokens in each part of a streamed generation; the first parts have short responses.

        share of tokens = share of responses x (1 - response_share + response_share x (before + up_to))

    `before` and `up_to` are the shares of the responses before a part and up to its end. Lengths of responses are taken
    to be spread evenly from 0 to the longest. `response_share` is the share of response tokens in all tokens of a step.
    """
    return [
        (up_to - before) * (1.0 - response_share + response_share * (before + up_to))
        for before, up_to in _parts(num_parts)
    ]


def response_share(config: Config) -> float:
    """Estimates the share of response tokens in all tokens of a step.

    Prompts are taken to have data.max_prompt_length tokens, and responses half of data.max_response_length.
    """
    prompt, response = config.data.max_prompt_length, config.data.max_response_length / 2
    return response / (prompt + response)
