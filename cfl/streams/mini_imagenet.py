"""Mini-ImageNet (Vinyals et al., 2016) in the layouts in which it is passed on: jpg files with lists, folders, pickles.

Its classes come in the 64 + 16 + 20 of Ravi and Larochelle (2017). Here they are put together, and each class's images
are cut in a train and a test part.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cfl.core.errors import DataError
from cfl.streams import pickles

CLASSES, TRAIN, TEST, SIDE = 100, 500, 100, 84  # classes, images a class, pixels a side
ADDRESS = "https://zenodo.org/record/7978538/files"  # learn2learn's copy of the pickles
FILES = tuple(f"mini-imagenet-cache-{part}.pkl" for part in ("train", "validation", "test"))

Image = Path | np.ndarray
Classes = dict[Any, list[Image]]

_PARTS = ("train", "val", "test")
# file name with the part left out, and the names of the parts in it; a part may have two names
_PICKLES = (
    ("mini-imagenet-cache-{}.pkl", (("train",), ("val", "validation"), ("test",))),  # Ren et al. (2018)
    ("miniImageNet_category_split_{}.pickle", (("train_phase_train",), ("val",), ("test",))),  # Gidaris et al. (2018)
    ("{}.pickle", (("train",), ("val",), ("test",))),
    ("{}.pkl", (("train",), ("val",), ("test",))),  # Ebrahimi et al. (2020): all classes in both train and test
)


def fetch(folder: Path) -> None:
    """Download the pickles, 1.3 GB; their checksums are not known, so that `read` counts classes and images."""
    from torchvision.datasets.utils import download_url

    for file in FILES:
        download_url(f"{ADDRESS}/{file}", str(folder))


def read(folder: Path, classes: int = CLASSES, train: int = TRAIN, test: int = TEST) -> dict[str, np.ndarray]:
    """Arrays x_train, y_train, x_test, y_test of a folder, images uint8 (n, 84, 84, 3), grouped by class.

    Looked for, in this order: pickles (`mini-imagenet-cache-train.pkl` and so on, dictionaries of image_data and
    class_dict, or of data or images and labels); train.csv, val.csv and test.csv (filename, label) with the folder
    images; folders train, val and test with a folder a class; a folder a class.
    Classes are numbered in the order of train, val and test, in each by name or label. A class's images are put in the
    order of their names, or as they come in a pickle; the first `train` are to train, the `test` after them to test.
    Images of another size are resized to 84 x 84 (Lanczos, as in the scripts of Finn et al., 2017).
    Raises DataError for a folder with none of these, unreadable files, other numbers of classes and of images a class.
    """
    found: Classes = {}
    for part in _pickled(folder) or _listed(folder) or _foldered(folder):
        for label in sorted(part):
            found.setdefault(label, []).extend(part[label])
    if len(found) != classes:
        raise DataError(
            f"{folder} has {len(found)} classes of Mini-ImageNet, not {classes}; put the pickles, the csv files with "
            "the folder images, or a folder a class there, of train, val and test"
        )
    for label, images in found.items():
        if len(images) != train + test:
            raise DataError(f"class '{label}' in {folder} has {len(images)} images, not {train + test}; replace it")
    return {
        **_stacked("train", [images[:train] for images in found.values()]),
        **_stacked("test", [images[train:] for images in found.values()]),
    }


def _pickled(folder: Path) -> list[Classes]:
    for pattern, parts in _PICKLES:
        files = [[folder / pattern.format(name) for name in part] for part in parts]
        present = [next(filter(Path.is_file, part), None) for part in files]
        if any(present):
            return [_unpickled(file) for file in present if file]
    return []


def _unpickled(file: Path) -> Classes:
    data = pickles.load(file)
    found: Classes = {}
    try:
        images = next(data[name] for name in ("image_data", "data", "images") if name in data)
        if "class_dict" in data:
            return {name: [images[row] for row in sorted(rows)] for name, rows in data["class_dict"].items()}
        for image, label in zip(images, data["labels"], strict=True):
            found.setdefault(int(label), []).append(image)
    except (AttributeError, IndexError, KeyError, StopIteration, TypeError, ValueError) as error:
        wanted = "image_data and class_dict, or data and labels"
        raise DataError(f"{file} must hold {wanted} ({error or type(error).__name__}); replace it") from error
    return found


def _listed(folder: Path) -> list[Classes]:
    found = []
    for file in filter(Path.is_file, (folder / f"{part}.csv" for part in _PARTS)):
        classes: Classes = {}
        with file.open(newline="", encoding="utf-8") as lines:
            for row in csv.DictReader(lines):
                if not row.get("filename") or not row.get("label"):
                    raise DataError(f"{file} must have the columns filename and label in every line; replace it")
                classes.setdefault(row["label"], []).append(folder / "images" / row["filename"])
        found.append({label: sorted(images) for label, images in classes.items()})
    return found


def _foldered(folder: Path) -> list[Classes]:
    parts = [folder / part for part in _PARTS if (folder / part).is_dir()] or [folder]
    owned = [[own for own in part.iterdir() if own.is_dir()] for part in parts]
    return [{own.name: _images(own) for own in folders} for folders in owned]


def _images(folder: Path) -> list[Image]:
    return [file for file in sorted(folder.iterdir()) if file.suffix.lower() in (".jpg", ".jpeg", ".png")]


def _stacked(part: str, classes: Sequence[Sequence[Image]]) -> dict[str, np.ndarray]:
    images = [image for own in classes for image in own]
    x = np.empty((len(images), SIDE, SIDE, 3), np.uint8)
    for row, image in enumerate(images):
        x[row] = _pixels(image)
    return {f"x_{part}": x, f"y_{part}": np.repeat(np.arange(len(classes)), list(map(len, classes)))}


def _pixels(image: Image) -> np.ndarray:
    from PIL import Image as pillow

    if isinstance(image, np.ndarray) and (image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3):
        raise DataError(f"an image of Mini-ImageNet is {image.dtype} of shape {image.shape}, not uint8, H x W x 3")
    if isinstance(image, np.ndarray) and image.shape[:2] == (SIDE, SIDE):
        return image
    try:
        opened = pillow.open(image) if isinstance(image, Path) else pillow.fromarray(image)
        opened = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"image {image} cannot be read ({error}); replace it") from error
    resized = opened if opened.size == (SIDE, SIDE) else opened.resize((SIDE, SIDE), pillow.Resampling.LANCZOS)
    return np.asarray(resized)
