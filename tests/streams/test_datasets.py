"""Loading data sets: npz files, torchvision's folders, and the errors for missing and damaged ones."""

import hashlib
import pickle
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from cfl.core import ConfigError, DataError
from cfl.streams.datasets import load


@pytest.fixture(autouse=True)
def no_data_root(monkeypatch):
    monkeypatch.delenv("CFL_DATA", raising=False)


def _arrays(colour: bool = False) -> dict[str, np.ndarray]:
    draws = np.random.default_rng(0)
    shape = (4, 5, 3) if colour else (4, 5)
    return {
        "x_train": draws.integers(0, 256, (6, *shape), dtype=np.uint8),
        "y_train": np.arange(6) % 10,
        "x_test": draws.integers(0, 256, (2, *shape), dtype=np.uint8),
        "y_test": np.array([9, 0]),
    }


def test_npz_becomes_channel_first(tmp_path, monkeypatch):
    grey, colour = _arrays(), _arrays(colour=True)
    np.savez(tmp_path / "mnist.npz", **grey)
    np.savez(
        tmp_path / "cifar10.npz", **{**colour, "y_test": colour["y_test"][:, None]}
    )  # Keras keeps labels as (n, 1)

    found = load("mnist", tmp_path)
    assert found.x_train.shape == (6, 1, 4, 5) and found.x_train.dtype == torch.uint8
    assert (found.x_train[:, 0].numpy() == grey["x_train"]).all()
    assert found.y_test.dtype == torch.int64 and found.y_test.tolist() == [9, 0]

    monkeypatch.setenv("CFL_DATA", str(tmp_path))
    found = load("cifar10")
    assert found.x_test.shape == (2, 3, 4, 5) and found.y_test.tolist() == [9, 0]
    for channel in range(3):
        assert (found.x_test[:, channel].numpy() == colour["x_test"][..., channel]).all()


def test_torchvision_layout_is_read(tmp_path):
    """MNIST's raw files: big-endian magic number (0x0801 labels, 0x0803 images), sizes, then bytes."""
    arrays, raw = _arrays(), tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        head = np.array([0x0803, *x.shape], dtype=">i4").tobytes()
        (raw / f"{prefix}-images-idx3-ubyte").write_bytes(head + x.tobytes())
        (raw / f"{prefix}-labels-idx1-ubyte").write_bytes(
            np.array([0x0801, len(y)], dtype=">i4").tobytes() + y.astype(np.uint8).tobytes()
        )
    found = load("mnist", tmp_path)
    assert (found.x_train[:, 0].numpy() == arrays["x_train"]).all() and found.y_train.tolist() == [0, 1, 2, 3, 4, 5]
    assert (found.x_test[:, 0].numpy() == arrays["x_test"]).all() and found.y_test.tolist() == [9, 0]


def test_svhn_is_read_from_its_mat_files(tmp_path, monkeypatch):
    """The files hold X (H x W x 3 x N) and y (N x 1), in which 10 stands for the digit 0."""
    arrays, splits = _arrays(colour=True), {}
    for part in ("train", "test"):
        file = tmp_path / f"{part}_32x32.mat"
        x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
        savemat(file, {"X": x.transpose(1, 2, 3, 0), "y": np.where(y == 0, 10, y)[:, None].astype(np.uint8)})
        splits[part] = ["", file.name, hashlib.md5(file.read_bytes()).hexdigest()]
    monkeypatch.setattr("torchvision.datasets.SVHN.split_list", splits)
    found = load("svhn", tmp_path)
    for part in ("train", "test"):
        x = getattr(found, f"x_{part}")
        assert (x.permute(0, 2, 3, 1).numpy() == arrays[f"x_{part}"]).all()
        assert getattr(found, f"y_{part}").tolist() == arrays[f"y_{part}"].tolist()
    (tmp_path / "test_32x32.mat").write_bytes(b"broken")
    with pytest.raises(DataError, match="'svhn' in .*torchvision cannot read it"):
        load("svhn", tmp_path)


def _cinic(root, parts=("train", "valid", "test"), classes=10):
    """A folder of PNG files for each class: two in train, one in the other parts, each of one colour."""
    for number in range(classes):
        for at, part in enumerate(parts):
            folder = root / "cinic-10" / part / f"class-{number}"
            folder.mkdir(parents=True)
            for image in range(2 if part == "train" else 1):
                Image.new("RGB", (4, 4), (number, at, image)).save(folder / f"{image}.png")


def test_cinic10_is_the_train_and_test_folders(tmp_path):
    _cinic(tmp_path)
    found = load("cinic10", tmp_path)
    # classes by the order of their names; colour (class, 0 for train and 2 for test, number of the image)
    assert found.x_train.shape == (20, 3, 4, 4) and found.x_test.shape == (10, 3, 4, 4)
    assert found.x_train[:, :, 3, 1].tolist() == [[number, 0, image] for number in range(10) for image in range(2)]
    assert found.y_train.tolist() == [number for number in range(10) for _ in range(2)]
    assert found.x_test[:, :, 0, 0].tolist() == [[number, 2, 0] for number in range(10)]
    assert found.y_test.tolist() == list(range(10))


def test_damaged_cinic10_says_what_is_wrong(tmp_path):
    with pytest.raises(DataError, match="cinic-10. Put it there.*has no --download"):
        load("cinic10", tmp_path, download=True)
    _cinic(tmp_path, classes=9)
    with pytest.raises(DataError, match="has 9 classes in train and 9 in test; .*the same 10 classes in both"):
        load("cinic10", tmp_path)
    image = tmp_path / "cinic-10" / "test" / "class-3" / "0.png"
    image.write_bytes(image.read_bytes()[:40])
    with pytest.raises(DataError, match="'cinic10' in .*cannot be read.*unpack it again"):
        load("cinic10", tmp_path)
    (tmp_path / "other").mkdir()
    _cinic(tmp_path / "other", parts=("train",))
    with pytest.raises(DataError, match="'cinic10' in .*cannot be read"):
        load("cinic10", tmp_path / "other")


def test_data_sets_without_a_package_are_read_from_npz(tmp_path):
    np.savez(tmp_path / "notmnist.npz", **_arrays())
    np.savez(tmp_path / "tiny-imagenet100.npz", **{**_arrays(colour=True), "y_test": np.array([99, 0])})
    assert load("notmnist", tmp_path).x_train.shape == (6, 1, 4, 5)
    assert load("tiny-imagenet100", tmp_path).y_test.tolist() == [99, 0]
    with pytest.raises(DataError, match=r"looked at \S*tiny-imagenet100\.npz\. .*has no --download"):
        load("tiny-imagenet100", tmp_path / "nothing", download=True)
    with pytest.raises(DataError, match=r"a folder with tiny-imagenet100\.npz$"):
        load("tiny-imagenet100")


def _medmnist(colour=True):
    arrays = _arrays(colour)
    named = {"train_images": arrays["x_train"], "train_labels": arrays["y_train"][:, None].astype(np.uint8)}
    named |= {"val_images": arrays["x_test"] + 1, "val_labels": np.array([[1], [1]], np.uint8)}
    return arrays, {**named, "test_images": arrays["x_test"], "test_labels": np.array([[7], [0]], np.uint8)}


def test_medmnist_files_are_read_by_their_package(tmp_path):
    pytest.importorskip("medmnist", reason="the extra medmnist is not installed")
    for name, colour in (("pathmnist", True), ("tissuemnist", False)):
        arrays, named = _medmnist(colour)
        np.savez(tmp_path / f"{name}.npz", **named)
        found = load(name, tmp_path)
        assert found.x_train.shape == (6, 3 if colour else 1, 4, 5)
        assert (found.x_test[:, 0].numpy() == arrays["x_test"].reshape(2, 4, 5, -1)[..., 0]).all()
        assert found.y_train.tolist() == [0, 1, 2, 3, 4, 5] and found.y_test.tolist() == [7, 0]


def test_medmnist_name_with_our_arrays_needs_no_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "medmnist", None)  # as if medmnist were not installed
    np.savez(tmp_path / "pathmnist.npz", **{**_arrays(colour=True), "y_test": np.array([8, 0])})
    assert load("pathmnist", tmp_path).y_test.tolist() == [8, 0]
    (tmp_path / "pathmnist.npz").write_bytes(b"neither")
    with pytest.raises(DataError, match=r"pathmnist\.npz cannot be read as an npz file"):
        load("pathmnist", tmp_path)


def test_missing_medmnist_package_is_named_with_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "medmnist", None)
    np.savez(tmp_path / "pathmnist.npz", **_medmnist()[1])
    with pytest.raises(ConfigError, match=r"'pathmnist' .* needs medmnist; .*pip install 'cfl\[medmnist\]'"):
        load("pathmnist", tmp_path)


def test_medmnist_errors_are_data_errors(tmp_path, monkeypatch):
    pytest.importorskip("medmnist", reason="the extra medmnist is not installed")
    with pytest.raises(DataError, match=r"looked at \S*tissuemnist\.npz\. .*--download"):
        load("tissuemnist", tmp_path)
    named = _medmnist()[1]
    np.savez(tmp_path / "pathmnist.npz", **{**named, "test_labels": np.array([[9], [0]], np.uint8)})
    with pytest.raises(DataError, match=r"y_test of .*pathmnist\.npz has labels outside 0\.\.8"):
        load("pathmnist", tmp_path)
    content = (tmp_path / "pathmnist.npz").read_bytes()
    (tmp_path / "pathmnist.npz").write_bytes(content[:150] + b"xxxx" + content[154:])
    with pytest.raises(DataError, match="'pathmnist' in .*medmnist cannot read it"):
        load("pathmnist", tmp_path)

    def offline(**arguments):
        assert arguments["md5"] == "ebe78ee8b05294063de985d821c1c34b"  # medmnist's own checksum of TissueMNIST
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.utils.download_url", offline)
    with pytest.raises(DataError, match="'tissuemnist' in .*medmnist cannot download it"):
        load("tissuemnist", tmp_path, download=True)


def test_damaged_torchvision_folder_is_a_data_error(tmp_path):
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for name in ("train", "test", "meta"):
        (folder / name).write_bytes(pickle.dumps({}))  # torchvision checks the files' checksums
    with pytest.raises(DataError, match="cifar-100-python.*--download"):
        load("cifar100", tmp_path)


def test_raw_files_of_garbage_are_a_data_error(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for part in ("train", "t10k"):
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            (folder / f"{part}-{name}").write_bytes(b"garbage" * 9)
    for download, verb in ((False, "read"), (True, "download")):  # torchvision keeps files that are there
        with pytest.raises(DataError) as error:
            load("mnist", tmp_path, download=download)
        assert str(error.value) == (
            f"data set 'mnist' in {folder}: torchvision cannot {verb} it (a file of another format); if it is there, "
            "delete it, and --download fetches it again"
        )


def test_nothing_is_downloaded_without_download(tmp_path, monkeypatch):
    asked = []

    class Fake:
        def __init__(self, root, train, download):
            asked.append((root, download))
            part = "train" if train else "test"
            self.data, self.targets = _arrays()[f"x_{part}"], _arrays()[f"y_{part}"]

    monkeypatch.setattr("torchvision.datasets.MNIST", Fake)
    with pytest.raises(DataError):
        load("mnist", tmp_path)
    assert asked == []
    assert load("mnist", tmp_path, download=True).y_test.tolist() == [9, 0]
    assert asked == [(str(tmp_path), True)] * 2


def test_failed_download_is_a_data_error(tmp_path, monkeypatch):
    def offline(root, train, download):
        raise OSError("no route to host")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", offline)
    with pytest.raises(DataError, match="'cifar10'.*cannot download it .*no route"):
        load("cifar10", tmp_path, download=True)


@pytest.mark.parametrize("name", ["cifar10", "cifar100", "notmnist"])
def test_an_archive_with_another_checksum_is_not_unpacked(name, tmp_path, monkeypatch):
    """Its member `../outside` would be written beside the data root. torchvision unpacks whatever has the checksum."""
    written = []

    def download(address, file, *options):
        with tarfile.open(file, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("../outside"))
        written.append(Path(file).name)

    monkeypatch.setattr("torchvision.datasets.utils._get_redirect_url", lambda address, **options: address)
    monkeypatch.setattr("torchvision.datasets.utils._urlretrieve", download)
    with pytest.raises(DataError, match=f"'{name}'.* cannot .*corrupted"):
        load(name, tmp_path / "data", download=True)
    assert written and all(file.endswith(".tar.gz") for file in written)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_missing_data_names_the_places_and_the_remedies(tmp_path):
    with pytest.raises(DataError) as error:
        load("cifar100", tmp_path)
    for part in (str(tmp_path / "cifar100.npz"), str(tmp_path / "cifar-100-python"), "CFL_DATA", "--data-root"):
        assert part in str(error.value)
    assert "--download" in str(error.value)
    with pytest.raises(DataError, match="none is set.*CFL_DATA"):
        load("mnist")
    with pytest.raises(ConfigError, match="did you mean 'cifar100'"):
        load("cifar-100", tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"y_test": None}, "no array y_test"),
        ({"x_train": np.zeros((5, 4, 5), np.uint8)}, "array y_train .* 6 labels for the 5 images"),
        ({"x_test": np.zeros((2, 4, 4), np.uint8)}, "array x_test .*differs from x_train"),
        ({"x_test": np.zeros((2, 20), np.uint8)}, "array x_test .*shape"),
        ({"x_train": np.zeros((6, 4, 5), np.float32)}, "array x_train .*float32"),
        ({"y_test": np.array([0, 10])}, r"array y_test .*outside 0\.\.9"),
        ({"y_test": np.array([0.5, 1.0])}, "array y_test .*integers"),
        ({"y_test": np.array([{}, 1], dtype=object)}, "array y_test .*cannot be read"),
    ],
)
def test_damaged_npz_names_file_and_array(tmp_path, change, message):
    arrays = {name: array for name, array in {**_arrays(), **change}.items() if array is not None}
    np.savez(tmp_path / "mnist.npz", **arrays)
    with pytest.raises(DataError, match=message) as error:
        load("mnist", tmp_path)
    assert "mnist.npz" in str(error.value)


def test_file_that_is_not_an_npz_file(tmp_path):
    np.savez(tmp_path / "whole.npz", **_arrays())
    whole = (tmp_path / "whole.npz").read_bytes()
    for content in (b"", b"no archive", whole[:200], whole[:150] + b"xxxx" + whole[154:]):
        (tmp_path / "mnist.npz").write_bytes(content)
        with pytest.raises(DataError, match="mnist.npz"):
            load("mnist", tmp_path)
    np.save(tmp_path / "one.npy", np.zeros(3))
    (tmp_path / "one.npy").rename(tmp_path / "mnist.npz")
    with pytest.raises(DataError, match="mnist.npz"):
        load("mnist", tmp_path)
