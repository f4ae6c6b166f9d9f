"""Data sets as tensors, from `.npz` files or torchvision's folders; nothing is downloaded unasked.

A data root is the argument or else the environment variable CFL_DATA. `<name>.npz` there holds the arrays x_train,
y_train, x_test, y_test (uint8 images, grey N x H x W, colour N x H x W x 3); it is preferred to torchvision's layout.
"""

import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl import rng
from cfl.errors import DataError, unknown
from cfl.streams.store import Pool
from cfl.streams.torchvision_fix import import_torchvision


@dataclass(frozen=True, eq=False)
class Arrays:
    """The official train and test parts of a data set.

    x_train, x_test: (n, C, H, W) uint8 or (n, d) float32; y_train, y_test: (n,) int64 class numbers from 0.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class _Source:
    classes: int
    torchvision: str
    folder: str


_SOURCES = {
    "mnist": _Source(10, "MNIST", "MNIST/raw"),
    "fashion-mnist": _Source(10, "FashionMNIST", "FashionMNIST/raw"),
    "cifar10": _Source(10, "CIFAR10", "cifar-10-batches-py"),
    "cifar100": _Source(100, "CIFAR100", "cifar-100-python"),
}
_NAMES = ("x_train", "y_train", "x_test", "y_test")


def load(name: str, data_root: Path | None = None, download: bool = False) -> Arrays:
    """The data set "mnist", "fashion-mnist", "cifar10" or "cifar100".

    data_root: folder to look in, else CFL_DATA; download: fetch it through torchvision into that folder if missing.
    Raises ConfigError for an unknown name; DataError where it is missing (with the places looked at) or damaged.
    """
    if name not in _SOURCES:
        raise unknown("data set", name, _SOURCES)
    source = _SOURCES[name]
    place = data_root or os.environ.get("CFL_DATA")
    if not place:
        raise DataError(
            f"data set '{name}' needs a data root, and none is set; give --data-root or set CFL_DATA to a folder with "
            f"{name}.npz or {source.folder}, and add --download to fetch it into that folder"
        )
    root = Path(place)
    if (root / f"{name}.npz").exists():
        return _from_npz(root / f"{name}.npz", source.classes)
    if download or (root / source.folder).is_dir():
        return _from_torchvision(name, source, root, download)
    raise DataError(
        f"data set '{name}' not found; looked at {root / f'{name}.npz'} and {root / source.folder}. "
        "Put it there, set --data-root or CFL_DATA to where it is, or add --download to fetch it"
    )


def digits() -> Arrays:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels as vectors: x (n, 64) float32, 1,400 train and 397 test samples.

    The split is one fixed random permutation (seed 0), the same in every run. Inputs are standardised with one
    mean and one standard deviation, those of all pixels of the train part: a deviation for each pixel would blow up the
    noise of the rarely inked ones.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = rng.numpy_generator(rng.key(0, "digits", "split")).permutation(len(x))
    x, y = x[order], torch.from_numpy(y[order]).long()
    x = torch.from_numpy((x - x[:1400].mean()) / x[:1400].std()).float()
    return Arrays(x[:1400], y[:1400], x[1400:], y[1400:])


def pooled(arrays: Arrays, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None) -> Pool:
    """One pool of all images: the train part's rows, then the test part's, so that sample ids are unique.

    mean, std: one number a channel (C,), in units of the image scaled to [0, 1].
    """
    columns = [None if c is None else torch.tensor(c, dtype=torch.float32).view(-1, 1, 1) for c in (mean, std)]
    return Pool(torch.cat([arrays.x_train, arrays.x_test]), *columns)


def _from_npz(path: Path, classes: int) -> Arrays:
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in _NAMES if name not in file]
            if missing:
                raise DataError(f"{path} has no array {missing[0]}; it must hold {', '.join(_NAMES)}")
            arrays = {name: _read(file, name, path) for name in _NAMES}
    except (OSError, ValueError, EOFError, TypeError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} cannot be read as an npz file ({error}); replace it") from error
    return _checked(arrays, str(path), classes)


def _read(file: Any, name: str, path: Path) -> np.ndarray:
    try:
        return file[name]
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"array {name} of {path} cannot be read ({error}); replace the file") from error


def _checked(arrays: dict[str, np.ndarray], place: str, classes: int) -> Arrays:
    for part in ("train", "test"):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x.dtype != np.uint8 or not (x.ndim == 3 or x.ndim == 4 and x.shape[3] == 3):
            raise DataError(
                f"array x_{part} of {place} is {x.dtype} of shape {x.shape}; "
                "it must be uint8, N x H x W or N x H x W x 3"
            )
        if not np.issubdtype(y.dtype, np.integer) or y.shape not in ((y.size,), (y.size, 1)):
            raise DataError(f"array y_{part} of {place} is {y.dtype} of shape {y.shape}; it must be N integers")
        if len(x) != len(y) or not len(x):
            raise DataError(f"array y_{part} of {place} has {len(y)} labels for the {len(x)} images of x_{part}")
        if y.min() < 0 or y.max() >= classes:
            raise DataError(f"array y_{part} of {place} has labels outside 0..{classes - 1}; replace the file")
    if arrays["x_train"].shape[1:] != arrays["x_test"].shape[1:]:
        shapes = f"{arrays['x_train'].shape[1:]} and {arrays['x_test'].shape[1:]}"
        raise DataError(f"array x_test of {place} differs from x_train in the shape of an image: {shapes}")
    return Arrays(
        _images(arrays["x_train"]), _labels(arrays["y_train"]), _images(arrays["x_test"]), _labels(arrays["y_test"])
    )


def _images(x: np.ndarray) -> Tensor:
    x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    return torch.from_numpy(np.ascontiguousarray(x))


def _labels(y: np.ndarray) -> Tensor:
    return torch.from_numpy(y.reshape(-1).astype(np.int64))


def _from_torchvision(name: str, source: _Source, root: Path, download: bool) -> Arrays:
    import_torchvision()
    from torchvision import datasets

    arrays: dict[str, np.ndarray] = {}
    for part, train in (("train", True), ("test", False)):
        try:
            data = getattr(datasets, source.torchvision)(root=str(root), train=train, download=download)
        except (RuntimeError, OSError, ValueError, EOFError) as error:
            what = "download it" if download else "read it; --download fetches it again"
            raise DataError(
                f"data set '{name}' in {root / source.folder}: torchvision cannot {what} ({error})"
            ) from error
        arrays[f"x_{part}"], arrays[f"y_{part}"] = np.asarray(data.data), np.asarray(data.targets)
    return _checked(arrays, str(root / source.folder), source.classes)
