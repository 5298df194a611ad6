"""Tells decoders of images apart: JPEG and WebP are decoded by libraries whose builds differ in single bits."""

import base64

import PIL
import xxhash

from splitppo.images.pixels import decode_rgb

# 24 x 24 pixels of smooth random colours: a JPEG whose colours have half the resolution, and a WebP with losses.
_JPEG = (
    "/9j/4AAQSkZJRgABAQAAAQABAAD/2wBDAAoHBwgHBgoICAgLCgoLDhgQDg0NDh0VFhEYIx8lJCIfIiEmKzcvJik0KSEiMEExNDk7Pj4+JS5ESUM8"
    "SDc9Pjv/2wBDAQoLCw4NDhwQEBw7KCIoOzs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozs7Ozv/wAARCAAYABgD"
    "ASIAAhEBAxEB/8QAGAABAAMBAAAAAAAAAAAAAAAAAAQFBgL/xAAgEAACAgMAAgMBAAAAAAAAAAABAgADBAUREjEhIkFh/8QAGAEAAgMAAAAAAAAA"
    "AAAAAAAABAYCAwf/xAAfEQACAgICAwEAAAAAAAAAAAABAgADBRIEERQhMSL/2gAMAwEAAhEDEQA/AJOuwLEvUlT7mtt+NcV/k4ZsSsdHJFyNlUyl"
    "AwgPLzT7BCv2Sr4mtbFvUxm0x2bJYgfsS+tx0uYtzsQxMRXaoff7Eq5gthHcrL9jb4H7GVtWwsfJ4WPuIlOYqQdECP8AnzpX+ZpcRvKoExERd8i0"
    "egZlFrEuZ//Z"
)
_WEBP = (
    "UklGRrgAAABXRUJQVlA4IKwAAABQBgCdASoYABgAPrVIoEonJCMhsBgMAOAWiWwAnTKEen+q/iryBnAPdXJkAFOaJfXeEvJfpg5CFV2yAAD9IXPr"
    "2RQe1X2VCLy9M7ObC9TlGzP4QlqRVRKPPpgfzj7S2mn2iQQi0culEYJMUOudcxWz82T3iY/p71DNAq3/YmgdKuI0qm4pu0+WHjb/PYd/0pcL2PwA"
    "hcVr7Yh2c54moRKf4K2u4RWCabEwgAAA"
)


def describe_decoder() -> str:
    """Returns Pillow's version with a digest of decoded samples; equal texts decode images alike."""
    digest = xxhash.xxh3_64()
    for sample in (_JPEG, _WEBP):
        digest.update(decode_rgb(base64.b64decode(sample)).tobytes())
    return f"Pillow {PIL.__version__}, {digest.hexdigest()}"
