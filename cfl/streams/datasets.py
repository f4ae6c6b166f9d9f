"""Data sets as tensors, from `.npz` files or from the layouts of their distributors.

The data root is the argument, or else the environment variable CFL_DATA. Its file `<name>.npz` holds the arrays
x_train, y_train, x_test, y_test (uint8 images, grey N x H x W, colour N x H x W x 3) and has priority over other
layouts. Nothing is downloaded without `download`.
"""

import csv
import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cfl.core import DataError, packages, rng, unknown
from cfl.core.typed import typed
from cfl.streams import mini_imagenet, notmnist, npz
from cfl.streams.store import Pool


@dataclass(frozen=True, eq=False, repr=False)
class Arrays:
    """The official train and test samples of a data set.

    x_train, x_test: (n, C, H, W) uint8 or (n, d) float32; y_train, y_test: (n,) int64 class numbers from 0.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor


@dataclass(frozen=True)
class _Source:
    classes: int
    place: str = ""  # file or folder in the data root that `read` reads
    read: "Callable[[str, _Source, Path, bool], Arrays] | None" = None  # None: <name>.npz only
    loader: str = ""  # class of torchvision or medmnist, or address; empty: no download


_NAMES = ("x_train", "y_train", "x_test", "y_test")
_MEDMNIST_NAMES = {"train_images.npy", "train_labels.npy", "test_images.npy", "test_labels.npy"}
_READ_ERRORS = (*npz.DAMAGED, csv.Error, AssertionError)  # torchvision asserts what MNIST's files hold


@typed
def load(name: str, data_root: Path | str | None = None, download: bool = False) -> Arrays:
    """Load a data set with its official train and test samples.

    name: mnist, fashion-mnist, cifar10, cifar100, svhn, cinic10, pathmnist, tissuemnist, notmnist, mini-imagenet,
    tiny-imagenet100.
    The validation samples of pathmnist and tissuemnist are not used. cinic10 is the folder `cinic-10` of the public
    archive: `train` and `test`, 90,000 images each; `valid` is not used, as in FedSOL. notmnist and mini-imagenet are
    folders of these names, in a layout that `notmnist.read` or `mini_imagenet.read` reads. tiny-imagenet100, a hundred
    classes of Tiny ImageNet, is read from `<name>.npz` only.
    data_root: folder to look in (default: CFL_DATA); download: fetch a missing data set into that folder, through
    torchvision or medmnist, which verify checksums (for mini-imagenet, the numbers of classes and images are verified).
    Raises ConfigError for an unknown name, an argument of another type, and a format whose package is not installed;
    DataError if the data set is missing (with the places looked at) or damaged.
    """
    if name not in _SOURCES:
        raise unknown("data set", name, _SOURCES)
    source = _SOURCES[name]
    place = data_root or os.environ.get("CFL_DATA")
    places = list(dict.fromkeys(filter(None, (f"{name}.npz", source.place))))
    if not place:
        fetch = ", and add --download to fetch it into that folder" if source.loader else ""
        raise DataError(
            f"data set '{name}' needs a data root, and none is set; give --data-root or set CFL_DATA to a folder with "
            f"{' or '.join(places)}{fetch}"
        )
    root, file = Path(place), Path(place) / f"{name}.npz"
    if file.exists() and not (source.read is _from_medmnist and _is_medmnist(file)):
        again = "delete it and add --download, or " if source.loader else ""
        return _checked(npz.read(file, _NAMES, again), str(file), source.classes)
    if source.read and (download and source.loader or (root / source.place).exists()):
        return source.read(name, source, root, download)
    raise DataError(
        f"data set '{name}' not found; looked at {' and '.join(str(root / place) for place in places)}. "
        "Put it there, set --data-root or CFL_DATA to where it is, or "
        + ("add --download to fetch it" if source.loader else "make it by hand: this data set has no --download")
    )


def classes(name: str) -> int:
    """Number of classes of a data set that `load` knows."""
    return _SOURCES[name].classes


def digits() -> Arrays:
    """Scikit-learn's 1,797 digits of 8 x 8 pixels as vectors: x (n, 64) float32, 1,400 train and 397 test samples.

    The split is a fixed random permutation (seed 0), the same in every run. Inputs are standardised with one mean and
    one standard deviation, of all pixels of the train samples: a deviation for each pixel would amplify the noise of
    pixels that are rarely inked.
    """
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = rng.numpy_generator(rng.key(0, "digits", "split")).permutation(len(x))
    x, y = x[order], torch.from_numpy(y[order]).long()
    x = torch.from_numpy((x - x[:1400].mean()) / x[:1400].std()).float()
    return Arrays(x[:1400], y[:1400], x[1400:], y[1400:])


def iris() -> Arrays:
    """Scikit-learn's Iris in its first two principal components, unscaled: x (150, 2) float32, 50 samples a class.

    All samples are both train and test samples, as in the pilot study of FedProj (2025), section 3.
    """
    from sklearn.datasets import load_iris
    from sklearn.decomposition import PCA

    x, y = load_iris(return_X_y=True)
    components = PCA(2, svd_solver="full").fit_transform(x)  # scikit-learn fixes the signs
    inputs, labels = torch.from_numpy(components).float(), torch.from_numpy(y).long()
    return Arrays(inputs, labels, inputs, labels)


def pooled(arrays: Arrays, mean: tuple[float, ...] | None = None, std: tuple[float, ...] | None = None) -> Pool:
    """Put all images in one pool, train rows before test rows, so that sample ids are unique.

    mean, std: one number a channel (C,), or one for all, in units of the image scaled to [0, 1].
    """
    first, second = (None if c is None else torch.tensor(c, dtype=torch.float32).view(-1, 1, 1) for c in (mean, std))
    return Pool(torch.cat([arrays.x_train, arrays.x_test]), first, second)


def _checked(arrays: dict[str, np.ndarray], place: str, classes: int) -> Arrays:
    for split in ("train", "test"):
        x, y = arrays[f"x_{split}"], arrays[f"y_{split}"]
        if x.dtype != np.uint8 or not (x.ndim == 3 or x.ndim == 4 and x.shape[3] == 3) or 0 in x.shape[1:]:
            raise DataError(
                f"array x_{split} of {place} is {x.dtype} of shape {x.shape}; "
                "it must be uint8, N x H x W or N x H x W x 3"
            )
        if not np.issubdtype(y.dtype, np.integer) or y.shape not in ((y.size,), (y.size, 1)):
            raise DataError(f"array y_{split} of {place} is {y.dtype} of shape {y.shape}; it must be N integers")
        if len(x) != len(y) or not len(x):
            raise DataError(f"array y_{split} of {place} has {len(y)} labels for the {len(x)} images of x_{split}")
        outside = np.flatnonzero((y < 0) | (y >= classes))
        if len(outside):
            raise DataError(
                f"array y_{split} of {place} has labels outside 0..{classes - 1}, first {y.flat[outside[0]]} at "
                f"{outside[0]}; replace the file"
            )
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
    packages.need("vision", f"data set '{name}' in the format of its distributor")
    from torchvision import datasets

    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        which: dict[str, Any] = {"split": split} if name == "svhn" else {"train": split == "train"}
        try:
            data = getattr(datasets, source.loader)(root=str(root), download=download, **which)
        except _READ_ERRORS as error:
            what, why = "download" if download else "read", str(error) or "a file of another format"
            raise DataError(
                f"data set '{name}' in {root / source.place}: torchvision cannot {what} it ({why}); if it is there, "
                "delete it, and --download fetches it again"
            ) from error
        x, y = (data.data.transpose(0, 2, 3, 1), data.labels) if name == "svhn" else (data.data, data.targets)
        arrays[f"x_{split}"], arrays[f"y_{split}"] = np.asarray(x), np.asarray(y)
    return _checked(arrays, str(root / source.place), source.classes)


def _is_medmnist(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as file:
            return _MEDMNIST_NAMES <= set(file.namelist())
    except (OSError, zipfile.BadZipFile):
        return False


def _from_medmnist(name: str, source: _Source, root: Path, download: bool) -> Arrays:
    packages.need("medmnist", f"data set '{name}' in the format of MedMNIST")
    from medmnist import dataset as medmnist

    arrays: dict[str, np.ndarray] = {}
    for split in ("train", "test"):
        try:
            data = getattr(medmnist, source.loader)(split=split, root=str(root), download=download)
        except _READ_ERRORS as error:
            what = "download it" if download else "read it; delete it, and --download fetches it again"
            raise DataError(f"data set '{name}' in {root / source.place}: medmnist cannot {what} ({error})") from error
        arrays[f"x_{split}"], arrays[f"y_{split}"] = data.imgs, data.labels
    return _checked(arrays, str(root / source.place), source.classes)


def _from_folders(name: str, source: _Source, root: Path, download: bool) -> Arrays:
    packages.need("vision", f"data set '{name}' as folders of images")
    from torchvision.datasets import ImageFolder

    folder, arrays, found = root / source.place, {}, []
    for split in ("train", "test"):
        try:
            data = ImageFolder(str(folder / split))
            arrays[f"x_{split}"] = np.stack([np.asarray(image) for image, _ in data])
        except _READ_ERRORS as error:
            raise DataError(f"data set '{name}' in {folder} cannot be read ({error}); unpack it again") from error
        arrays[f"y_{split}"] = np.asarray(data.targets)
        found.append(data.classes)
    if found[0] != found[1] or len(found[0]) != source.classes:
        raise DataError(
            f"data set '{name}' in {folder} has {len(found[0])} classes in train and {len(found[1])} in test; "
            f"unpack it again, with the same {source.classes} classes in both"
        )
    return _checked(arrays, str(folder), source.classes)


def _from_folder(name: str, source: _Source, root: Path, download: bool) -> Arrays:
    """Read a data set from its own folder layout; fetch a missing folder first, completely or not at all."""
    folder, layout = root / source.place, _LAYOUTS[name]
    if not folder.exists():
        packages.need("vision", f"--download of data set '{name}'")
        partial = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(partial, ignore_errors=True)  # the rest of an interrupted download
        try:
            layout.fetch(partial)
            partial.rename(folder)
        except _READ_ERRORS as error:
            raise DataError(
                f"data set '{name}' cannot be fetched from {source.loader} ({error}); put it in {folder} by hand"
            ) from error
    try:
        arrays = layout.read(folder)
    except _READ_ERRORS as error:
        raise DataError(f"data set '{name}' in {folder} cannot be read ({error}); put it there again") from error
    return _checked(arrays, str(folder), source.classes)


_LAYOUTS: dict[str, Any] = {"notmnist": notmnist, "mini-imagenet": mini_imagenet}
_SOURCES = {
    "mnist": _Source(10, "MNIST/raw", _from_torchvision, "MNIST"),
    "fashion-mnist": _Source(10, "FashionMNIST/raw", _from_torchvision, "FashionMNIST"),
    "cifar10": _Source(10, "cifar-10-batches-py", _from_torchvision, "CIFAR10"),
    "cifar100": _Source(100, "cifar-100-python", _from_torchvision, "CIFAR100"),
    "svhn": _Source(10, "train_32x32.mat", _from_torchvision, "SVHN"),
    "cinic10": _Source(10, "cinic-10", _from_folders),
    "pathmnist": _Source(9, "pathmnist.npz", _from_medmnist, "PathMNIST"),
    "tissuemnist": _Source(8, "tissuemnist.npz", _from_medmnist, "TissueMNIST"),
    "notmnist": _Source(10, "notmnist", _from_folder, notmnist.ADDRESSES[0]),
    "mini-imagenet": _Source(100, "mini-imagenet", _from_folder, mini_imagenet.ADDRESS),
    "tiny-imagenet100": _Source(100),
}
