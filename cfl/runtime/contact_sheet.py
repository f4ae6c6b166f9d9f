"""Contact sheets: pictures with many images, for `images` of a strategy."""

from io import BytesIO
from pathlib import Path

import numpy as np
from torch import Tensor

SMALLEST = 28
"""Smallest width of an image on a sheet, in pixels."""
GAP = 1
"""Pixels between two images."""
GREY = 128
"""Value of the pixels between images: visible beside black and beside white."""
_ROWS = "rows"  # name of the text in a PNG file that holds the number of rows


def sheet(images: Tensor) -> np.ndarray:
    """Return a picture (height, width, channels) uint8 with a grid of images, `GAP` grey pixels apart.

    images: (rows, columns, channels, height, width) uint8, with 1 or 3 channels. Each image is enlarged by the smallest
    whole number that makes it at least `SMALLEST` pixels wide.
    """
    rows, columns, channels, height, width = images.shape
    factor = -(-SMALLEST // width)
    large = images.cpu().numpy().transpose(0, 3, 1, 4, 2).repeat(factor, axis=1).repeat(factor, axis=3)
    down, right = height * factor + GAP, width * factor + GAP  # from one image to the next
    grid = np.full((rows, down, columns, right, channels), GREY, dtype=np.uint8)
    grid[:, : down - GAP, :, : right - GAP] = large
    return grid.reshape(rows * down, columns * right, channels)[:-GAP, :-GAP]


def png(images: Tensor) -> bytes:
    """Return `sheet` of the images as the bytes of a PNG file, in grey for images of 1 channel."""
    from PIL import Image, PngImagePlugin

    picture, file, told = sheet(images), BytesIO(), PngImagePlugin.PngInfo()
    told.add_text(_ROWS, str(len(images)))
    Image.fromarray(picture[:, :, 0] if picture.shape[2] == 1 else picture).save(file, "PNG", pnginfo=told)
    return file.getvalue()


def measured(path: Path) -> tuple[tuple[int, int], int]:
    """Return width and height of a file of `png`, and its number of rows: 0 for a picture that does not say it.

    Raises OSError for a file that holds no picture.
    """
    from PIL import Image

    with Image.open(path) as picture:
        rows = str(picture.info.get(_ROWS, ""))
        return picture.size, int(rows) if rows.isdecimal() else 0
