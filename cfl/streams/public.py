"""Public data: unlabelled inputs of another data set, made as a stream's samples are."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from cfl.core import ConfigError, DataError, rng
from cfl.core.typed import typed
from cfl.streams import corpora
from cfl.streams.datasets import Arrays, load
from cfl.streams.store import Pool, Stream, unlabelled
from cfl.streams.tokens import Encoder, Texts

_CHUNK = 1024  # images resized at a time, to bound the memory of their float copies


@typed
def with_public(
    stream: Stream,
    name: str,
    *,
    samples: int | None = None,
    seed: int = 0,
    data_root: Path | str | None = None,
    download: bool = False,
) -> Stream:
    """The stream with train and test samples of a data set as public data, without labels (as in FedProj's code, 2025).

    name: a data set that `cfl.streams.datasets.load` knows, or `cfl.streams.corpora.load` for a stream of texts;
    samples: at most that many, drawn without replacement with key(seed, "public") and kept in the data set's order;
    None: all. Grey images are repeated to three channels, colour images averaged to one channel. Images of another
    height or width are resized by bilinear interpolation with antialiasing. Normalisation is that of the stream's first
    task. CINIC-10 contains the images of CIFAR-10, so neither is independent public data for the other. Texts are
    encoded by the stream's tokenizer.
    Raises ConfigError for an argument of another type, an unknown name, the stream's own data set and fewer than 1
    sample; DataError for a missing data set, and for a stream whose samples are vectors, floating-point images, or have
    other than 1 or 3 channels.
    """
    if samples is not None and samples < 1:
        raise ConfigError(f"public.samples must be at least 1, or null for all, not {samples}")
    if name in (_data_set(stream), *(task.name for task in stream.tasks)):  # a task may be a whole data set
        raise ConfigError(
            f"public data '{name}' is the data set of the clients of benchmark '{stream.name}'; take another data set"
        )
    if stream.encoder is not None:
        pool = _texts(name, stream.encoder, samples, seed, data_root)
    else:
        pool = _images(load(name, data_root, download), stream, name, samples, seed)
    return replace(stream, public=unlabelled(pool))


def _texts(name: str, encode: Encoder, samples: int | None, seed: int, data_root: Path | str | None) -> Pool:
    """Encode the drawn texts of a data set."""
    train, test = corpora.load(name, data_root)
    first, labels = [*train.first, *test.first], [*train.labels, *test.labels]
    second = None if train.second is None or test.second is None else [*train.second, *test.second]
    drawn = Texts(first, second, labels).taken(_drawn(len(first), samples, seed).tolist())
    return Pool(encode(drawn.first, drawn.second), vocabulary=encode.vocabulary)


def _images(arrays: Arrays, stream: Stream, name: str, samples: int | None, seed: int) -> Pool:
    """Bring the drawn images of a data set to the shape of a stream's."""
    own = stream.tasks[0].train.pool
    if own.images.dim() != 4 or own.images.dtype != torch.uint8:
        raise DataError(
            f"public data '{name}' are uint8 images, but samples of stream '{stream.name}' are "
            f"{own.images.dtype} of shape {tuple(stream.input_shape)}; give the stream public inputs of its own "
            "(cfl.streams.from_tensors)"
        )
    images = torch.cat([arrays.x_train, arrays.x_test])
    images = images[_drawn(len(images), samples, seed)]
    return Pool(_fitted(images, stream.input_shape, name), own.mean, own.std)


def _drawn(count: int, samples: int | None, seed: int) -> Tensor:
    """Positions of the drawn samples, in ascending order."""
    if samples is None or samples >= count:
        return torch.arange(count)
    draws = rng.numpy_generator(rng.key(seed, "public"))
    return torch.from_numpy(draws.choice(count, samples, replace=False)).sort().values


def _data_set(stream: Stream) -> str:
    """Name of a built-in benchmark's data set: "cifar100" for "split-cifar100"."""
    return stream.name.removeprefix("split-").removeprefix("permuted-")


def _fitted(images: Tensor, shape: tuple[int, ...], name: str) -> Tensor:
    """Images (n, C, H, W) with the channels, height and width of a stream's samples; unchanged if they have them."""
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
