"""Reads an image file: PNG or JPEG, eight bits per channel."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, BinaryIO

from launcher.data.files.bad_file import BadFile
from launcher.errors import said
from launcher.untrusted.files import opened, read_bytes

if TYPE_CHECKING:
    from PIL.Image import Image

LARGEST = 256 << 20
"""The maximum size of a file, in bytes."""
MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr")
"""Pillow's names of the modes with at most eight bits per channel."""


def installed() -> bool:
    return find_spec("PIL") is not None


def side(path: str) -> tuple[int, int]:
    """The width and height in the file's header. Raises ``BadFile``."""
    with _errors(), opened(path, LARGEST) as file:
        size: tuple[int, int] = _head(file).size
    return size


def decoded(path: str, channels: int) -> Image:
    """Decodes the image, as greyscale if ``channels`` is 1 and otherwise as RGB. Raises ``BadFile``."""
    with _errors():
        return _head(io.BytesIO(read_bytes(path, LARGEST))).convert("L" if channels == 1 else "RGB")


def _head(file: BinaryIO) -> Image:
    from PIL import Image

    image = Image.open(file, formats=("PNG", "JPEG"))
    if image.mode not in MODES:
        raise BadFile(f"pixels of kind {image.mode}, of more than eight bits a channel")
    return image


@contextmanager
def _errors() -> Iterator[None]:
    """Turns errors of Pillow and of the system into ``BadFile``."""
    from PIL import UnidentifiedImageError

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of images too large for memory, and of broken ones
            yield
    except BadFile:
        raise
    except UnidentifiedImageError:
        raise BadFile("is neither PNG nor JPEG") from None
    except OSError as error:
        raise BadFile(error.strerror or f"broken: {error}") from error
    except Exception as error:  # a broken file can raise anything
        raise BadFile(f"broken: {said(error)}") from error
