"""Puts as many image tokens into a prompt as stand for its images, where the chat template has written one for each."""

from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from controller.data.prompt_files import PromptRow
from controller.data.row_values import check_texts
from controller.data.tokenizer import Tokenizer
from splitppo.config import ConfigError
from splitppo.config_error import config_errors
from splitppo.images.settings import ImageSettings

Tokens = NDArray[np.int32]


class ImageTokens:
    """The tokens of images in prompts, for one model and its tokenizer.

    Raises:
        ConfigError: the tokenizer lacks the token that stands for images.
    """

    def __init__(self, settings: ImageSettings, tokenizer: Tokenizer) -> None:
        token = tokenizer.backend.id_to_token(settings.image_token_id)
        if token is None:
            raise ConfigError(
                f"data.tokenizer: it has no token of id {settings.image_token_id}, which stands for images in"
                " actor.model (image_token_id)"
            )
        self._token = token
        self._settings = settings

    def check_texts(self, rows: Iterable[PromptRow]) -> None:
        """Checks that no text of a prompt spells the token that stands for an image; ConfigError names the row."""

        def refuse_token(text: str) -> None:
            if self._token in text:
                raise ValueError(f"the text holds {self._token} itself")

        for row in rows:
            with config_errors(ValueError, before=f"{row.place}: "):
                check_texts(row.prompt, refuse_token)

    def expanded(self, ids: Tokens, row: PromptRow) -> Tokens:
        """Returns the tokens of a prompt with each image token repeated, as often as the row's images have tokens.

        Raises:
            ConfigError: the chat template has not written one token for each image; the message names the row.
        """
        is_image = ids == self._settings.image_token_id
        num_written = int(is_image.sum())
        num_tokens = row.images.num_tokens
        if num_written != len(num_tokens):
            raise ConfigError(
                f"{row.place}: the chat template writes {num_written} {self._token}; expected one for each of"
                f" {len(num_tokens)} images"
            )
        repeats = np.ones(len(ids), np.int64)
        repeats[is_image] = num_tokens
        return np.repeat(ids, repeats)

    def first_cut(self, ids: Tokens, row: PromptRow, start: int, stop: int) -> int | None:
        """Returns the number of the first image, from 1, of which a token is in ids[start:stop]; None if there is none.

        Of an image are its own tokens, and those that the template writes around them.
        """
        for number, (first, end) in enumerate(self._spans(ids, row), start=1):
            if first < stop and end > start:
                return number
        return None

    def _spans(self, ids: Tokens, row: PromptRow) -> Iterator[tuple[int, int]]:
        """Yields the first place of each image in expanded tokens, and the place after its last."""
        places = np.flatnonzero(ids == self._settings.image_token_id)
        ends = np.cumsum(row.images.num_tokens)
        for num_tokens, end_of_tokens in zip(row.images.num_tokens, ends.tolist(), strict=True):
            first = int(places[end_of_tokens - num_tokens])
            last = int(places[end_of_tokens - 1])
            begins = first > 0 and ids[first - 1] == self._settings.vision_start_token_id
            goes_on = last + 1 < len(ids) and ids[last + 1] == self._settings.vision_end_token_id
            yield first - int(begins), last + 1 + int(goes_on)
