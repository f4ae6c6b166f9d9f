"""Public data: unlabelled inputs of another data set, brought to the shape and the scale of a stream's own."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from cfl.core import rng
from cfl.core.errors import ConfigError, DataError
from cfl.streams.datasets import load
from cfl.streams.store import Pool, Stream, TaskSamples, unlabelled

_CHUNK = 1024  # images resized at a time, to bound the memory for their float copies


def with_public(
    stream: Stream,
    name: str,
    *,
    samples: int | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
) -> Stream:
    """The same stream with the public part that `public` makes; arguments and errors as there."""
    part = public(name, stream, samples=samples, seed=seed, data_root=data_root, download=download)
    return replace(stream, public=part)


def public(
    name: str,
    stream: Stream,
    *,
    samples: int | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
) -> TaskSamples:
    """Inputs of a data set for a stream, train and test images together (FedProj, 2025, code); labels are left behind.

    name: of a data set that `cfl.streams.datasets.load` knows;
    samples: at most that many, drawn without replacement with key(seed, "public") and kept in the data set's order;
    None: all. Grey images are repeated to three channels, colours averaged to one; another height or width is reached
    by bilinear interpolation with antialiasing. All is normalised as the stream's first task is.
    CINIC-10 holds the images of CIFAR-10: as public data of one another they are not independent of the private data.
    Raises ConfigError for an unknown name, the stream's own data set and fewer than 1 sample; DataError for a missing
    data set, and where images cannot be brought to the samples of the stream (vectors, floating-point images).
    """
    if samples is not None and samples < 1:
        raise ConfigError(f"public.samples must be at least 1, or null for all, not {samples}")
    if name in (_data_set(stream), *(task.name for task in stream.tasks)):  # tasks may be whole data sets
        raise ConfigError(
            f"public data '{name}' is what the clients of benchmark '{stream.name}' hold; take another data set"
        )
    arrays, own = load(name, data_root, download), stream.tasks[0].train.pool
    if own.images.dim() != 4 or own.images.dtype != torch.uint8:
        raise DataError(
            f"public data '{name}' are uint8 images, and samples of stream '{stream.name}' are "
            f"{own.images.dtype} of shape {tuple(stream.input_shape)}; make that stream with public inputs of its "
            "own (cfl.streams.from_tensors)"
        )
    images = torch.cat([arrays.x_train, arrays.x_test])
    if samples is not None and samples < len(images):
        draws = rng.numpy_generator(rng.key(seed, "public"))
        images = images[torch.from_numpy(draws.choice(len(images), samples, replace=False)).sort().values]
    return unlabelled(Pool(_fitted(images, stream.input_shape, name), own.mean, own.std))


def _data_set(stream: Stream) -> str:
    """The data set of a built-in benchmark, by its name: "split-cifar100" has that of "cifar100"."""
    return stream.name.removeprefix("split-").removeprefix("permuted-")


def _fitted(images: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Samples (n, ...) in the shape of a stream's: as they are, or images with other channels, height and width."""
    if tuple(images.shape[1:]) == tuple(shape):
        return images
    channels, size = shape[0], shape[1:]
    if channels not in (1, 3):
        raise DataError(f"public data '{name}' cannot become images of {channels} channels; 1 or 3 are possible")
    return torch.cat([_resized(chunk, channels, size) for chunk in images.split(_CHUNK)])


def _resized(images: Tensor, channels: int, size: tuple[int, ...]) -> Tensor:
    x = images.float()
    if channels < x.shape[1]:
        x = x.mean(1, keepdim=True)
    if tuple(x.shape[2:]) != tuple(size):
        x = functional.interpolate(x, size=size, mode="bilinear", antialias=True)
    return x.round().clamp(0, 255).to(torch.uint8).expand(-1, channels, -1, -1)
