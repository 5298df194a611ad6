"""Reads the images that belong to a data row, and puts parts of the type `image` in the place of `<image>`.

As in verl, the signs of media mean something only in rows that have a column for media.
"""

import re
from collections.abc import Mapping, Sequence, Sized
from pathlib import Path
from typing import Any

from controller.data.chat_template import as_messages
from controller.data.images import NO_IMAGES, ImageSpool, RowImages
from controller.data.row_values import is_missing
from controller.models.vision import NO_VISION, VisionInput
from splitppo.batch import Batch
from splitppo.config import DataConfig
from splitppo.config_error import config_errors

IMAGE_SIGN = "<image>"
# Columns with videos and sounds, and their signs in prompts, as in verl's data.
OTHER_MEDIA = ("videos", "audios")
_OTHER_SIGNS = ("<video>", "<audio>")
_MAX_SHOWN = 400  # characters of a path in a sentence
_TEXT_AND_IMAGES = "models are trained on texts and images alone here"


class RowImageReader:
    """Reads the images of the rows of a split, one row after the other.

    Attributes:
        columns: the columns that may have media.
        spool: has the files of all images that were read; None if the model reads text alone.
    """

    def __init__(self, config: DataConfig, vision: VisionInput = NO_VISION) -> None:
        """Prepares reading; rows with images are refused unless the model takes them (`vision`)."""
        self.columns = (config.image_key, *OTHER_MEDIA)
        self.spool = None if vision.settings is None else ImageSpool(vision.settings)
        self._key = config.image_key
        self._max_bytes = config.max_image_bytes
        self._reads_none_because = vision.reads_none_because

    def read(
        self, content: Mapping[str, Any], prompt: str | list[Any], place: str, folder: Path
    ) -> tuple[str | list[Any], RowImages]:
        """Returns the prompt of a row with a part for each of its images, and these images.

        Args:
            content: the columns of the row.
            prompt: its prompt, as its column has it.
            place: file and row, for errors.
            folder: the folder to which paths are relative.

        Raises:
            ConfigError: the row has other media, an image is not one that is read, or the prompt has fewer or more
                images than the column; the message names the place.
        """
        with config_errors(ValueError, before=f"{place}: "):
            self._refuse_other_media(content, prompt)
            if self._key in content:
                prompt = with_parts(prompt)
            given = self._given(content.get(self._key))
            if given and self.spool is None:
                raise ValueError(f"{self._reads_none_because}, but column {self._key!r} is not empty")
            num_signs = sum(part.get("type") == "image" for part in _parts(prompt))
            if isinstance(prompt, str) and self._key in content:
                num_signs = prompt.count(IMAGE_SIGN)
            if num_signs != len(given):
                in_column = _number_of_images(len(given))
                raise ValueError(
                    f"the prompt has {num_signs or 'no'} {IMAGE_SIGN}, column {self._key!r} has {in_column}"
                )
            if not given or self.spool is None:
                return prompt, NO_IMAGES
            if isinstance(prompt, str):
                raise ValueError(
                    f"column {self._key!r} is not empty, but the prompt is plain text; expected chat messages, in which"
                    " the chat template places images"
                )
            files = [self._file(image, number, folder) for number, image in enumerate(given, start=1)]
            return prompt, self.spool.add(files)

    def columns_of(self, rows: Sequence[RowImages]) -> Batch:
        """Returns the columns `images` and `image_sizes` of rows; ConfigError if the disk is full."""
        assert self.spool is not None, "a model that reads text alone has no rows with images"
        return self.spool.columns(rows)

    def _refuse_other_media(self, content: Mapping[str, Any], prompt: str | list[Any]) -> None:
        """Raises ValueError if a row has videos or sounds, or images elsewhere than in their column."""
        for name in OTHER_MEDIA:
            if not _is_empty(content.get(name)):
                raise ValueError(f"column {name!r} is not empty; {_TEXT_AND_IMAGES}")
        has_media_column = any(name in content for name in self.columns)
        for part in _parts(prompt):
            kind = part.get("type") or "text"
            if kind not in ("text", "image"):
                raise ValueError(f"the prompt has a part of type {kind!r}; {_TEXT_AND_IMAGES}")
            other_keys = [key for key, value in part.items() if key != "type" and value is not None]
            if kind == "image" and other_keys:
                raise ValueError(
                    f"the prompt has a part of type 'image' with {other_keys[0]!r}; images come from column"
                    f" {self._key!r}"
                )
            sign = next((sign for sign in _OTHER_SIGNS if sign in str(part)), None)
            if has_media_column and sign is not None:
                raise ValueError(f"the prompt has {sign!r}; {_TEXT_AND_IMAGES}")

    def _given(self, value: Any) -> list[Any]:
        """Returns the entries of the column, which is empty if it is null; ValueError if it is no list."""
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise ValueError(
                f"column {self._key!r} must be a list of {{bytes, path}} or of paths, got {type(value).__name__}"
            )
        return [*value]

    def _file(self, image: Any, number: int, folder: Path) -> bytes:
        """Returns the file of one image; ValueError if there is none, or if it is too large."""
        found = image
        if isinstance(image, Mapping):
            found = image.get("path")
            if image.get("bytes") is not None:
                found = image["bytes"]
                if not isinstance(found, bytes):
                    raise ValueError(f"image {number}: expected 'bytes' to be bytes, got {type(found).__name__}")
        if isinstance(found, bytes):
            self._check_size(len(found), number)
            return found
        if not isinstance(found, str | Path):
            kind = "neither" if isinstance(image, Mapping) else type(image).__name__
            raise ValueError(f"image {number} must be {{bytes, path}} or a path, got {kind}")
        return self._read(found, number, folder)

    def _read(self, path: str | Path, number: int, folder: Path) -> bytes:
        """Returns the content of the file at a path; ValueError if it cannot be read, or if it is too large."""
        shown = _shortened(str(folder / path))
        try:
            file = folder / Path(path).expanduser()
            if not file.is_file():
                what = f"{shown} is no plain file" if file.exists() else f"no such file {shown}"
                raise ValueError(f"image {number}: {what}")
            self._check_size(file.stat().st_size, number)
            return file.read_bytes()
        except OSError as error:
            raise ValueError(f"image {number}: {shown} cannot be read: {error.strerror}") from error
        except RuntimeError as error:  # of `~name`
            raise ValueError(f"image {number}: {shown} names the home of a user who is not known") from error

    def _check_size(self, num_bytes: int, number: int) -> None:
        if num_bytes > self._max_bytes:
            limit = f"data.max_image_bytes is {_megabytes(self._max_bytes)}"
            raise ValueError(f"image {number} has {_megabytes(num_bytes)}, {limit}")


def with_parts(prompt: str | list[Any]) -> str | list[Any]:
    """Returns chat messages in which the texts with `<image>` are lists of parts, as chat templates take them.

    A plain text stays as it is, and so do messages that have parts already.
    """
    if isinstance(prompt, str):
        return prompt
    return [_message_with_parts(message) for message in prompt]


def _message_with_parts(message: Any) -> Any:
    text = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(text, str) or IMAGE_SIGN not in text:
        return message
    pieces = [piece for piece in re.split(f"({IMAGE_SIGN})", text) if piece]
    parts = [{"type": "image"} if piece == IMAGE_SIGN else {"type": "text", "text": piece} for piece in pieces]
    return {**message, "content": parts}


def _parts(prompt: str | list[Any]) -> list[Mapping[str, Any]]:
    """Returns all parts of the messages of a prompt; a text is one part."""
    parts: list[Mapping[str, Any]] = []
    for message in as_messages(prompt):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else [content]:
            parts.append(part if isinstance(part, Mapping) else {"type": "text", "text": part})
    return parts


def _is_empty(value: Any) -> bool:
    """Returns True if a column has nothing for a row: null, NaN, or something of length 0."""
    return is_missing(value) or (isinstance(value, Sized) and len(value) == 0)


def _shortened(text: str) -> str:
    """Returns a text that fits into a sentence: of a long one, for instance an image as text, only both ends."""
    return text if len(text) <= _MAX_SHOWN else f"{text[: _MAX_SHOWN // 2]}...{text[-_MAX_SHOWN // 2 :]}"


def _number_of_images(number: int) -> str:
    return f"{number or 'no'} image{'' if number == 1 else 's'}"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.9g} MB"
