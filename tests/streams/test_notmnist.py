"""notMNIST: a folder a letter, the pickles of HAT's code, and the download."""

import hashlib
import pickle
import tarfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import numpy as np
import pytest
from PIL import Image

from cfl.core import DataError
from cfl.streams import notmnist
from cfl.streams.datasets import load


@pytest.fixture(autouse=True)
def no_data_root(monkeypatch):
    monkeypatch.delenv("CFL_DATA", raising=False)


def _letters(folder, images=3, side=28):
    """Image i of letter k is grey 20 k + i; files are not written in the order of their names."""
    for label, letter in enumerate("ABCDEFGHIJ"):
        (folder / letter).mkdir(parents=True)
        for number in reversed(range(images)):
            grey = np.full((side, side), 20 * label + number, np.uint8)
            Image.fromarray(grey).save(folder / letter / f"font-{number}.png")


def _greys(x):
    assert (x == x[:, :1, :1]).all()
    return x[:, 0, 0].tolist()


def test_every_tenth_image_of_the_letters_is_a_test_image(tmp_path):
    _letters(tmp_path / "notmnist")
    found = notmnist.read(tmp_path / "notmnist")
    greys = [20 * label + number for label in range(10) for number in range(3)]  # in the order of letters and names
    test = [0, 10, 20]  # of 30
    assert _greys(found["x_test"]) == [greys[i] for i in test]
    assert found["y_test"].tolist() == [0, 3, 6]  # the letters of images 0, 10 and 20, three a letter
    assert _greys(found["x_train"]) == [grey for i, grey in enumerate(greys) if i not in test]
    assert found["y_train"].tolist() == [i // 3 for i in range(30) if i not in test]
    arrays = load("notmnist", tmp_path)
    assert arrays.x_train.shape == (27, 1, 28, 28) and (arrays.x_train[:, 0].numpy() == found["x_train"]).all()


def test_small_set_has_as_many_test_images_as_the_papers():
    """18,724 images can be read, of 18,726; FOT's Table 8 has 16,853 and 1,873, two of them empty."""
    test = np.arange(18724) % 10 == 0
    assert (test.sum(), (~test).sum()) == (1873, 16851)


def test_unreadable_images_are_counted_and_skipped(tmp_path):
    inner = tmp_path / "notMNIST_small"  # the folder in the archive
    _letters(inner)
    (inner / "A" / "font-1.png").write_bytes(b"")
    (inner / "F" / "font-0.png").write_bytes(b"no image")
    with pytest.warns(
        UserWarning,
        match=r"2 of 30 images of \S*notMNIST_small .*skipped, the first is font-1\.png in A",
    ):
        found = notmnist.read(tmp_path)
    assert sorted(_greys(found["x_train"]) + _greys(found["x_test"])) == sorted(
        20 * label + number for label in range(10) for number in range(3) if (label, number) not in ((0, 1), (5, 0))
    )


def test_missing_letters_and_unequal_images_are_named(tmp_path):
    _letters(tmp_path)
    Image.new("L", (30, 28)).save(tmp_path / "C" / "font-3.png")
    with pytest.raises(DataError, match="differ in shape"):
        notmnist.read(tmp_path)
    for file in (tmp_path / "D").iterdir():
        file.unlink()
    with pytest.raises(DataError, match=r"D has no png files; notMNIST has the folders A to J"):
        notmnist.read(tmp_path)


def test_pickles_of_hats_code_keep_their_split(tmp_path):
    folder = tmp_path / "notmnist"
    folder.mkdir()
    draws = np.random.default_rng(0)
    made = {}
    for part, count in (("train", 9), ("test", 2)):
        made[part] = draws.integers(0, 256, (count, 1, 32, 32), dtype=np.uint8), np.arange(count, dtype=np.uint8)
        data = dict(zip(("features", "labels"), made[part]))
        (folder / f"notmnist_{part}.pkl").write_bytes(pickle.dumps(data))
    found = load("notmnist", tmp_path)
    assert (found.x_train.numpy() == made["train"][0]).all() and found.y_train.tolist() == list(range(9))
    assert (found.x_test.numpy() == made["test"][0]).all() and found.y_test.tolist() == [0, 1]
    for damaged in ({"features": made["test"][0]}, [1], {"features": 1, "labels": [1]}):
        (folder / "notmnist_test.pkl").write_bytes(pickle.dumps(damaged))
        with pytest.raises(DataError, match=r"notmnist_test\.pkl must hold images as features, and labels"):
            load("notmnist", tmp_path)


@pytest.fixture
def served(tmp_path):
    """Address of a local server of a folder's files, and the folder."""
    (tmp_path / "served").mkdir()
    handler = partial(QuietHandler, directory=str(tmp_path / "served"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", tmp_path / "served"
        server.shutdown()


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


def test_download_uses_the_mirror_and_verifies_the_checksum(tmp_path, served, monkeypatch):
    address, folder = served
    _letters(tmp_path / "made" / "notMNIST_small")
    archive = folder / "notMNIST_small.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(tmp_path / "made" / "notMNIST_small", "notMNIST_small")
    monkeypatch.setattr(notmnist, "ADDRESSES", [f"{address}/{name}" for name in ("nothing.tar.gz", archive.name)])
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(DataError, match=r"'notmnist' cannot be fetched .*corrupted.* put it in \S*notmnist by hand"):
        load("notmnist", root, download=True)  # not the checksum of the real archive
    assert not (root / "notmnist").exists()
    monkeypatch.setattr(notmnist, "MD5", hashlib.md5(archive.read_bytes()).hexdigest())
    assert load("notmnist", root, download=True).x_test.shape == (3, 1, 28, 28)
    assert {file.name for file in root.iterdir()} == {"notmnist"}
    assert load("notmnist", root).x_train.shape == (27, 1, 28, 28)


def test_missing_notmnist_names_the_places(tmp_path):
    with pytest.raises(DataError, match=r"looked at \S*notmnist\.npz and \S*notmnist\. .*add --download"):
        load("notmnist", tmp_path)
