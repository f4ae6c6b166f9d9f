"""Mini-ImageNet (Vinyals et al., 2016) in its usual layouts: jpg files with csv lists, folders, pickles.

Files have the 64 + 16 + 20 classes of Ravi and Larochelle (2017) apart. `read` joins them, and splits the images of
each class into train and test images.
"""

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from cfl.core import DataError
from cfl.streams import pickles

CLASSES, TRAIN, TEST, SIDE = 100, 500, 100, 84  # classes, train and test images a class, pixels a side
ADDRESS = "https://zenodo.org/record/7978538/files"  # learn2learn's copy of the pickles
FILES = tuple(f"mini-imagenet-cache-{part}.pkl" for part in ("train", "validation", "test"))

Image = Path | np.ndarray
Classes = dict[Any, list[Image]]

_PARTS = ("train", "val", "test")
# file name without the part, and the names of the three parts in it; a part may have two names
_PICKLES = (
    ("mini-imagenet-cache-{}.pkl", (("train",), ("val", "validation"), ("test",))),  # Ren et al. (2018)
    ("miniImageNet_category_split_{}.pickle", (("train_phase_train",), ("val",), ("test",))),  # Gidaris et al. (2018)
    ("{}.pickle", (("train",), ("val",), ("test",))),
    ("{}.pkl", (("train",), ("val",), ("test",))),  # Ebrahimi et al. (2020): all classes in train and in test
)


def fetch(folder: Path) -> None:
    """Download the pickles, 1.3 GB. Their checksums are unknown; `read` checks the numbers of classes and images."""
    from torchvision.datasets.utils import download_url

    for file in FILES:
        download_url(f"{ADDRESS}/{file}", str(folder))


def read(folder: Path, classes: int = CLASSES, train: int = TRAIN, test: int = TEST) -> dict[str, np.ndarray]:
    """Read arrays x_train, y_train, x_test, y_test from a folder, images uint8 (n, 84, 84, 3), grouped by class.

    The folder holds one of these, tried in this order: pickles (`mini-imagenet-cache-train.pkl` and so on, dictionaries
    of image_data and class_dict, or of data or images and labels); train.csv, val.csv and test.csv (filename, label)
    with the folder images; folders train, val and test with a folder for each class; a folder for each class.
    Classes are numbered in the order train, val, test, and by name or label in each. Images of a class are in the order
    of the pickle, or sorted by name; the first `train` are train images, the next `test` are test images.
    Images of another size are resized to 84 x 84 pixels (Lanczos, as in the scripts of Finn et al., 2017).
    Raises DataError for a folder without these layouts, unreadable files, and other numbers of classes or images.
    """
    found: Classes = {}
    for part in _pickled(folder) or _listed(folder) or _foldered(folder):
        for label in sorted(part):
            found.setdefault(label, []).extend(part[label])
    if len(found) != classes:
        raise DataError(
            f"{folder} has {len(found)} classes of Mini-ImageNet, not {classes}; put the pickles, the csv files with "
            "the folder images, or a folder for each class there, for all of train, val and test"
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
    return [{own.name: _images(own) for own in part.iterdir() if own.is_dir()} for part in parts]


def _images(folder: Path) -> list[Image]:
    return [file for file in sorted(folder.iterdir()) if file.suffix.lower() in (".jpg", ".jpeg", ".png")]


def _stacked(split: str, classes: Sequence[Sequence[Image]]) -> dict[str, np.ndarray]:
    images = [image for own in classes for image in own]
    x = np.empty((len(images), SIDE, SIDE, 3), np.uint8)
    for row, image in enumerate(images):
        x[row] = _pixels(image)
    return {f"x_{split}": x, f"y_{split}": np.repeat(np.arange(len(classes)), list(map(len, classes)))}


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
