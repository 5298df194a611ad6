"""Counts the images of a split's rows, and keeps their files outside of memory, for the worker groups.

The files are written into one temporary file that has no name any more, so that it ends with the process, and that is
mapped into memory once all are there. No image is decoded: formats and sizes are those of headers.
"""

import mmap
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain

import numpy as np
import xxhash
from numpy.typing import NDArray

from splitppo.batch import Batch, Column, RowStore, SharedColumn
from splitppo.columns import spec_of
from splitppo.config import ConfigError
from splitppo.images.grid import num_image_tokens, patch_grid
from splitppo.images.headers import read_header
from splitppo.images.settings import ImageSettings

IMAGES = "images"
IMAGE_SIZES = "image_sizes"
_MAX_ROW_BYTES = np.iinfo(np.int32).max


@dataclass(frozen=True)
class RowImages:
    """The images of one row, in the order of the prompt.

    Attributes:
        stored_row: which of the spool's rows has their files; row 0 has none.
        names: of each image the XXH3-128 of its file, in hexadecimal.
        grids: of each image the rows and columns of its patches.
        num_tokens: of each image the number of tokens that stand for it.
        num_bytes: of all their files together.
    """

    stored_row: int = 0
    names: tuple[str, ...] = ()
    grids: tuple[tuple[int, int], ...] = ()
    num_tokens: tuple[int, ...] = ()
    num_bytes: int = 0


NO_IMAGES = RowImages()


class ImageSpool:
    """The files of the images of a split's rows; rows with the same images share them."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._file = tempfile.TemporaryFile(prefix="splitppo-images-")  # noqa: SIM115 - it lives as long as the mapping
        self._rows: dict[tuple[str, ...], RowImages] = {(): NO_IMAGES}
        self._sizes: list[list[int]] = [[]]  # of each row: bytes, patch rows and patch columns of each image

    def add(self, files: Sequence[bytes]) -> RowImages:
        """Counts the images of a row by the headers of their files, and stores the files unless another row has them.

        Raises:
            ValueError: an image is not one that is read, or all together are too large; the message names it.
            ConfigError: the disk is full.
        """
        names = tuple(xxhash.xxh3_128_hexdigest(data) for data in files)
        known = self._rows.get(names)
        if known is not None:
            return known
        grids = tuple(self._grid(data, number) for number, data in enumerate(files, start=1))
        num_bytes = sum(map(len, files))
        if num_bytes > _MAX_ROW_BYTES:
            raise ValueError(f"the images have {num_bytes:,} bytes, more than a row can hold")
        with _disk_errors():
            self._file.writelines(files)
        num_tokens = tuple(num_image_tokens(rows, columns, self._settings) for rows, columns in grids)
        added = self._rows[names] = RowImages(len(self._sizes), names, grids, num_tokens, num_bytes)
        sizes = [(len(data), rows, columns) for data, (rows, columns) in zip(files, grids, strict=True)]
        self._sizes.append([*chain.from_iterable(sizes)])
        return added

    def columns(self, rows: Sequence[RowImages]) -> Batch:
        """Returns the columns `images` and `image_sizes` of rows; their values are those of the mapped file.

        Raises:
            ConfigError: the disk is full.
        """
        stored = np.array([row.stored_row for row in rows], np.int32)
        sizes = np.array([*chain.from_iterable(self._sizes)], spec_of(IMAGE_SIZES).dtype)
        num_bytes = np.array([sum(of_row[::3]) for of_row in self._sizes], np.int32)
        num_sizes = np.array([len(of_row) for of_row in self._sizes], np.int32)
        return Batch(
            len(rows),
            {
                IMAGES: SharedColumn(RowStore((Column(self._mapped(), num_bytes),)), stored),
                IMAGE_SIZES: SharedColumn(RowStore((Column(sizes, num_sizes),)), stored),
            },
        )

    def _grid(self, data: bytes, number: int) -> tuple[int, int]:
        """Returns rows and columns of patches of an image; ValueError, which names it by its number, for another."""
        try:
            header = read_header(data)
        except ValueError as error:
            raise ValueError(f"image {number} {error}") from error
        return patch_grid(header.width, header.height, self._settings)

    def _mapped(self) -> NDArray[np.uint8]:
        """Returns all stored bytes, without reading them; read-only."""
        with _disk_errors():
            self._file.flush()
        if self._file.tell() == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(self._file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)


@contextmanager
def _disk_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the images of the data files cannot be kept in {tempfile.gettempdir()}: {error.strerror}; the environment"
            " variable TMPDIR names another folder"
        ) from error
