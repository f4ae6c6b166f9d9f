"""TARGET's generator of synthetic samples (Zhang et al., ICCV 2023, official code), as a function of its parameters."""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor, nn

from cfl.contract import Pixels
from cfl.core import Tree, rng

COLUMNS = 8
"""Most images of a class that a strategy shows."""


class ImageGenerator(nn.Module):
    """Maps latent vectors (n, latent) to images (n, channels, height, width).

    A linear layer makes 2 `width` planes of a quarter of the image's height and width. Two upsamplings follow, each
    with a convolution, batch normalisation and a leaky ReLU. Images whose sides are no multiples of 4 are cut out of
    larger ones. The last convolution's outputs have no bounds.
    """

    def __init__(self, latent: int, width: int, shape: Sequence[int]) -> None:
        super().__init__()
        channels, height, width_of_image = shape
        self.start = (2 * width, math.ceil(height / 4), math.ceil(width_of_image / 4))
        self.cut = (slice(height), slice(width_of_image))
        self.first = nn.Linear(latent, math.prod(self.start))
        self.planes = nn.Sequential(
            _normalised(2 * width),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, bias=False),
            _normalised(2 * width),
            nn.LeakyReLU(0.2),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(2 * width, width, 3, padding=1, bias=False),
            _normalised(width),
            nn.LeakyReLU(0.2),
            nn.Conv2d(width, channels, 3, padding=1),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.planes(self.first(z).view(-1, *self.start))[:, :, *self.cut]


def _normalised(planes: int) -> nn.Module:
    return nn.BatchNorm2d(planes, track_running_stats=False)  # the generator always runs in training mode


def build(latent: int, width: int, shape: Sequence[int]) -> nn.Module:
    """Make the generator of samples of a shape, (channels, height, width) or else through 2 `width` hidden units."""
    if len(shape) == 3:
        return ImageGenerator(latent, width, shape)
    norm = nn.BatchNorm1d(2 * width, track_running_stats=False)
    return nn.Sequential(nn.Linear(latent, 2 * width), norm, nn.LeakyReLU(0.2), nn.Linear(2 * width, math.prod(shape)))


@cache
def _structure(latent: int, width: int, shape: tuple[int, ...]) -> nn.Module:
    """The generator without memory for its parameters."""
    with torch.device("meta"):
        return build(latent, width, shape)


def initial(key: int, latent: int, width: int, shape: Sequence[int], device: torch.device) -> Tree:
    """Draw the generator's initial parameters, as torch does for its layers. key: of the draws."""
    with rng.fork(key):
        module = build(latent, width, shape)
    return {name: leaf.detach().to(device) for name, leaf in module.named_parameters()}


def generate(params: Tree, z: Tensor, width: int, shape: Sequence[int], pixels: Pixels | None) -> Tensor:
    """Generate samples (n, *shape) from z (n, latent): 8-bit images in [0, 1], or inputs without bounds."""
    x = torch.func.functional_call(_structure(z.shape[1], width, tuple(shape)), params, (z,)).view(-1, *shape)
    return x if pixels is None else x.sigmoid()


def stored(x: Tensor, pixels: Pixels | None) -> Tensor:
    """Round generated images to 8 bits; leave other samples as they are."""
    return x if pixels is None else (x * 255).round().to(torch.uint8)


def by_class(images: Tensor, classes: Tensor) -> Tensor | None:
    """The first images of each class, in ascending order: (classes, `COLUMNS` or fewer, *image).

    images: (n, *image); classes: (n,) int64. Every class has as many as the rarest one. None for samples that are no
    images in grey or RGB, such as vectors of bytes.
    """
    if images.dim() != 4 or images.shape[1] not in (1, 3):
        return None
    rows = [(classes == one).nonzero()[:COLUMNS, 0] for one in classes.unique()]
    columns = min(map(len, rows))
    return torch.stack([images[chosen[:columns]] for chosen in rows])


def inputs(x: Tensor, mean: Tensor | None, std: Tensor | None) -> Tensor:
    """Turn images, stored with 8 bits or generated in [0, 1], into inputs of the model; other samples stay."""
    x = x.float() / 255 if x.dtype == torch.uint8 else x
    x = x if mean is None else x - mean
    return x if std is None else x / std


def of_tasks(outputs: Tensor, tasks: Tensor, pixels_of: Sequence[Pixels | None]) -> Tensor:
    """Turn outputs (n, ...) without bounds into inputs of the model, each normalised as images of its task.

    tasks: (n,); pixels_of: of each task so far. Without `Pixels` an output is an input as it is.
    """
    if all(map(_alike, pixels_of, pixels_of[1:])):
        return _pictures(outputs, pixels_of[0])
    found = torch.empty_like(outputs)
    for task in tasks.unique().tolist():
        found[tasks == task] = _pictures(outputs[tasks == task], pixels_of[task])
    return found


def _alike(one: Pixels | None, other: Pixels | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(a is b or (a is not None and b is not None and a.equal(b)) for a, b in zip(one, other, strict=True))


def _pictures(x: Tensor, pixels: Pixels | None) -> Tensor:
    return x if pixels is None else inputs((x.tanh() + 1) / 2, *pixels)
