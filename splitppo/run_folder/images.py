"""`rollouts/images/NAME`: the images that recorded responses answer to, each once, as the data files have them.

NAME is the XXH3-128 of the file in hexadecimal; a response has the names of its images in its column `images`.
"""

import base64
import re
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from splitppo.images.headers import read_header
from splitppo.run_folder.files import RunDir, Unreadable

FOLDER = "images"  # in rollouts/
COLUMN = "images"
MAX_BYTES = 32 << 20
MAX_NAMES = 64  # of a response
_NAME = re.compile(r"[0-9a-f]{32}")
_TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "WEBP": "image/webp"}
# Returns name and file of each image of a prompt, by its row in the table of prompts.
ImagesOf = Callable[[int], Sequence[tuple[str, memoryview]]]
# Keeps the images of a prompt, by its row in the table of prompts, if there is room; returns their names.
KeepImages = Callable[[int], Sequence[str]]


def no_images(_: int) -> Sequence[str]:
    """Keeps nothing: what a run of text alone has in place of a `KeepImages`."""
    return ()


def is_name(text: str) -> bool:
    """Returns True if a text can be the name of an image."""
    return _NAME.fullmatch(text) is not None


def names_in(value: Any) -> list[str]:
    """Returns the names of images in a value of the column `images`; what is none is left out."""
    return list(filter(is_name, value.split()))[:MAX_NAMES] if isinstance(value, str) else []


def read_image(folder: RunDir, name: str) -> dict[str, str]:
    """Reads an image for a page: {"type": "image/png", "base64": "..."}, by what its bytes are.

    Raises:
        Unreadable: there is no such file; it is too large, no PNG, JPEG or WebP, has too many pixels by its header, or
            is not the image of this name.
    """
    if not is_name(name):
        raise Unreadable("An image has a name of 32 hexadecimal digits.")
    with folder.open("rollouts", FOLDER, name, max_bytes=MAX_BYTES) as file:
        data = file.read()
    try:
        header = read_header(data)
    except ValueError as error:
        raise Unreadable(f"rollouts/{FOLDER}/{name} {error}.") from error
    if xxhash.xxh3_128_hexdigest(data) != name:
        raise Unreadable(f"rollouts/{FOLDER}/{name} is another image than the one that the run recorded.")
    return {"type": _TYPES[header.format], "base64": base64.b64encode(data).decode()}
