"""notMNIST (Bulatov, 2011), the small set: letters A to J of public fonts, 28 x 28, grey, 18,724 readable images."""

from pathlib import Path

import numpy as np

from cfl.core import DataError, warn
from cfl.streams import pickles

ADDRESSES = (  # the author's, and a mirror of the same file
    "http://yaroslavvb.com/upload/notMNIST/notMNIST_small.tar.gz",
    "http://commondatastorage.googleapis.com/books1000/notMNIST_small.tar.gz",
)
MD5 = "c9890a473a9769fda4bdf314aaf500dd"
LETTERS = "ABCDEFGHIJ"


def fetch(folder: Path) -> None:
    """Download, check and unpack the small set; raises the OSError or RuntimeError of the last address."""
    from torchvision.datasets.utils import download_and_extract_archive

    for address in ADDRESSES:
        try:
            return download_and_extract_archive(address, str(folder), md5=MD5, remove_finished=True)
        except (OSError, RuntimeError) as error:
            if address == ADDRESSES[-1]:
                raise error


def read(folder: Path) -> dict[str, np.ndarray]:
    """Read arrays x_train, y_train, x_test, y_test from a folder, images uint8 (n, H, W).

    The folder holds `notmnist_train.pkl` and `notmnist_test.pkl` (16,853 and 1,873 images of 32 x 32 pixels: the
    conversion in HAT's code, Serra et al., 2018, which GPM's code uses too), or else one folder of png files for each
    letter, directly or in `notMNIST_small`. The png files have no official split: in the order of letters and file
    names, every tenth image, from the first, is a test image. Unreadable images are skipped, and a warning counts them.
    Raises DataError for a folder with neither layout, pickles of another kind, and images of unequal shape.
    """
    files = {split: folder / f"notmnist_{split}.pkl" for split in ("train", "test")}
    if all(file.is_file() for file in files.values()):
        return {name: array for split, file in files.items() for name, array in _unpickled(split, file).items()}
    inner = folder / "notMNIST_small"
    return _lettered(inner if inner.is_dir() else folder)


def _unpickled(split: str, file: Path) -> dict[str, np.ndarray]:
    data = pickles.load(file)
    try:
        x, y = np.asarray(data["features"]), np.asarray(data["labels"])
        return {f"x_{split}": x.reshape(len(x), *x.shape[-2:]).astype(np.uint8), f"y_{split}": y.astype(np.int64)}
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"{file} must hold images as features, and labels ({error}); replace it") from error


def _lettered(folder: Path) -> dict[str, np.ndarray]:
    from PIL import Image

    images, labels, broken = [], [], []
    for label, letter in enumerate(LETTERS):
        files = sorted((folder / letter).glob("*.png"))
        if not files:
            raise DataError(f"{folder / letter} has no png files; notMNIST has the folders A to J: unpack it again")
        for file in files:
            try:
                images.append(np.asarray(Image.open(file).convert("L")))
            except (OSError, SyntaxError):
                broken.append(file)
                continue
            labels.append(label)
    if broken:
        count = f"{len(broken)} of {len(images) + len(broken)} images of {folder} cannot be read and are skipped"
        warn(f"{count}, the first is {broken[0].name} in {broken[0].parent.name}")
    if len({image.shape for image in images}) != 1:
        raise DataError(f"the images of {folder} differ in shape, or none can be read; unpack it again")
    x, y, test = np.stack(images), np.array(labels), np.arange(len(images)) % 10 == 0
    return {"x_train": x[~test], "y_train": y[~test], "x_test": x[test], "y_test": y[test]}
