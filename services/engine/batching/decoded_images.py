"""Keeps decoded images in memory, because every pass over a step's rows needs them again."""

import functools
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from splitppo.images.pixels import decode_rgb
from splitppo.machine.memory_limits import DECODED_IMAGES_BYTES


class DecodedImages:
    """The images that were needed last, decoded, up to a number of bytes; the newest one is kept in any case."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._decoded: OrderedDict[str, NDArray[np.uint8]] = OrderedDict()  # from the one needed longest ago

    def rgb(self, name: str, data: bytes | memoryview) -> NDArray[np.uint8]:
        """Returns an image, [height, width, 3], from memory or from its file `data`; `name` is a digest of the file.

        Raises:
            ValueError: the file is damaged, see `decode_rgb`.
        """
        if name in self._decoded:
            self._decoded.move_to_end(name)
            return self._decoded[name]
        image = decode_rgb(bytes(data))
        self._decoded[name] = image
        self._num_bytes += image.nbytes
        while self._num_bytes > self._max_bytes and len(self._decoded) > 1:
            _, oldest = self._decoded.popitem(last=False)
            self._num_bytes -= oldest.nbytes
        return image


@functools.cache
def decoded_images() -> DecodedImages:
    """Returns the decoded images of this process, which all of its models share."""
    return DecodedImages(DECODED_IMAGES_BYTES)
