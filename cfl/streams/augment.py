"""Random crops, flips and cutouts of batches of images.

As in FedSOL (Lee et al., CVPR 2024), code: a crop of the image padded by 4, a horizontal flip, and the 16 x 16 cutout
of DeVries and Taylor (2017).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from cfl.core import ConfigError, unknown

KINDS = ("crop", "flip", "cutout")
_PAD, _HOLE = 4, 16  # pixels


def check(kinds: Sequence[str], shape: Sequence[int]) -> None:
    """Raise ConfigError for an unknown kind, and for samples of a shape other than (C, H, W)."""
    for kind in kinds:
        if kind not in KINDS:
            raise unknown("augmentation", kind, KINDS)
    if kinds and len(shape) != 3:
        raise ConfigError(
            f"augmentation ({', '.join(kinds)}) needs images (channels, height, width), not samples of shape "
            f"{tuple(shape)}; leave it out"
        )


def augment(x: Tensor, kinds: Sequence[str], generator: torch.Generator, fill: Tensor) -> Tensor:
    """Augment each image at random by the given kinds, always in the order of `KINDS`.

    x: (b, C, H, W) normalised; generator: on the CPU; fill: broadcastable to (C, H, W), black after normalisation.
    crop: an H x W window of the image with 4 black pixels of padding; flip: left to right, with probability 1/2;
    cutout: a square of 16 x 16 pixels around a uniformly drawn pixel, cut at the border, becomes 0 in all channels.
    An image's draws depend neither on the size of the batch nor on the other kinds.
    """
    (size, channels, height, width), device = x.shape, x.device
    draws = torch.randint(2**31, (size, 5, 1, 1, 1), generator=generator).to(device)
    rows, columns = torch.arange(height, device=device).view(-1, 1), torch.arange(width, device=device)
    if "crop" in kinds:
        top, left = (draws[:, place] % (2 * _PAD + 1) - _PAD for place in (0, 1))
        row, column = top + rows, left + columns
        shown = (0 <= row) & (row < height) & (0 <= column) & (column < width)
        images, planes = (torch.arange(n, device=device) for n in (size, channels))
        places = row.clamp(0, height - 1), column.clamp(0, width - 1)
        x = torch.where(shown, x[images.view(-1, 1, 1, 1), planes.view(-1, 1, 1), *places], fill)
    if "flip" in kinds:
        x = torch.where(draws[:, 2] % 2 == 0, x.flip(-1), x)
    if "cutout" in kinds:
        across = [(at - draws[:, place] % n) for at, place, n in ((rows, 3, height), (columns, 4, width))]
        inside = [(-_HOLE // 2 <= offset) & (offset < _HOLE // 2) for offset in across]
        x = x.masked_fill(inside[0] & inside[1], 0.0)
    return x
