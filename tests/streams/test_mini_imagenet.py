"""Mini-ImageNet in its layouts: small copies of each with the same images give the same arrays."""

import csv
import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from cfl import streams
from cfl.core import ConfigError, DataError
from cfl.streams import datasets, mini_imagenet

CLASSES = {"train": ("n03", "n01"), "val": ("n09",), "test": ("n02",)}  # of each part, not in the order of names
ORDER = ["n01", "n03", "n09", "n02"]  # of train, val and test, in each by name
TRAIN, TEST = 3, 2  # images a class
SIZES = {"classes": 4, "train": TRAIN, "test": TEST}


def _image(name, number, side=84):
    """An image of one colour, which jpg keeps nearly: class n0k has 25 k in red, image i has 40 i in blue."""
    return np.full((side, side, 3), (25 * int(name[1:]), 100, 40 * number), np.uint8)


def _cached(folder, val="val"):
    for part, names in CLASSES.items():
        images = np.stack([_image(name, i) for name in names for i in range(TRAIN + TEST)])
        rows = {name: list(range(at * 5, at * 5 + 5))[::-1] for at, name in enumerate(names)}
        data = pickle.dumps({"image_data": images, "class_dict": rows}, 2)
        (folder / f"mini-imagenet-cache-{val if part == 'val' else part}.pkl").write_bytes(data)


def _cached_by_learn2learn(folder):
    _cached(folder, "validation")


def _labelled(folder, pattern="{}.pickle", train="train"):
    """Labels are the classes' places in ORDER."""
    for part, names in CLASSES.items():
        found = [(_image(name, i), ORDER.index(name)) for i in range(TRAIN + TEST) for name in names]
        data = {"data": np.stack([image for image, _ in found]), "labels": [label for _, label in found]}
        (folder / pattern.format(train if part == "train" else part)).write_bytes(pickle.dumps(data))


def _labelled_by_gidaris(folder):
    _labelled(folder, "miniImageNet_category_split_{}.pickle", "train_phase_train")


def _split_by_images(folder):
    """All classes in both files, as lists of images."""
    for part, numbers in (("train", range(TRAIN)), ("test", range(TRAIN, TRAIN + TEST))):
        found = [(_image(name, i), label) for label, name in enumerate(ORDER) for i in numbers]
        data = {"images": [image for image, _ in found], "labels": [label for _, label in found]}
        (folder / f"{part}.pkl").write_bytes(pickle.dumps(data))


def _listed(folder, side=84):
    (folder / "images").mkdir()
    for part, names in CLASSES.items():
        rows = [(f"{name}_{i}.jpg", name) for i in reversed(range(TRAIN + TEST)) for name in names]
        for file, name in rows:
            Image.fromarray(_image(name, int(file[4]), side)).save(folder / "images" / file, quality=95)
        with (folder / f"{part}.csv").open("w", newline="") as lines:
            csv.writer(lines).writerows([("filename", "label"), *rows])


def _listed_in_full_size(folder):
    _listed(folder, side=120)


def _foldered(folder):
    for part, names in CLASSES.items():
        for name in names:
            (folder / part / name).mkdir(parents=True)
            (folder / part / name / "notes.txt").write_text("no image")
            for i in range(TRAIN + TEST):
                Image.fromarray(_image(name, i)).save(folder / part / name / f"{i}.JPEG", quality=95)


LAYOUTS = (
    _cached, _cached_by_learn2learn, _labelled, _labelled_by_gidaris, _split_by_images,
    _listed, _listed_in_full_size, _foldered,
)  # fmt: skip


def _assert_holds(arrays, order):
    assert arrays["x_train"].shape == (12, 84, 84, 3) and arrays["x_test"].shape == (8, 84, 84, 3)
    assert arrays["y_train"].tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3
    assert arrays["y_test"].tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    for part, numbers in (("train", range(TRAIN)), ("test", range(TRAIN, TRAIN + TEST))):
        expected = np.stack([_image(name, i) for name in order for i in numbers])
        assert np.abs(arrays[f"x_{part}"].astype(int) - expected).max() <= 3  # loss of jpg


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_hold_the_same_arrays(tmp_path, layout):
    layout(tmp_path)
    _assert_holds(mini_imagenet.read(tmp_path, **SIZES), ORDER)


def test_folders_of_classes_without_parts_are_sorted_by_name(tmp_path):
    _foldered(tmp_path)
    for part in CLASSES:
        for own in (tmp_path / part).iterdir():
            own.rename(tmp_path / own.name)
        (tmp_path / part).rmdir()
    _assert_holds(mini_imagenet.read(tmp_path, **SIZES), sorted(ORDER))


def test_images_are_resized_by_lanczos_and_made_colour(tmp_path):
    _foldered(tmp_path)
    grey = Image.fromarray(np.arange(100, dtype=np.uint8).reshape(10, 10) * 2)
    grey.save(tmp_path / "val" / "n09" / "0.png")
    (tmp_path / "val" / "n09" / "0.JPEG").unlink()
    found = mini_imagenet.read(tmp_path, **SIZES)["x_train"][6]  # the first of the third class
    expected = np.asarray(grey.convert("RGB").resize((84, 84), Image.Resampling.LANCZOS))
    assert (found == expected).all() and (found[..., 0] == found[..., 2]).all()


def test_wrong_numbers_are_named(tmp_path):
    with pytest.raises(DataError, match="has 0 classes of Mini-ImageNet, not 100; put the pickles"):
        mini_imagenet.read(tmp_path)
    _foldered(tmp_path)
    with pytest.raises(DataError, match="has 4 classes of Mini-ImageNet, not 100"):
        mini_imagenet.read(tmp_path)
    with pytest.raises(DataError, match="class 'n01' in .* has 5 images, not 600"):
        mini_imagenet.read(tmp_path, classes=4)
    (tmp_path / "test" / "n02" / "4.JPEG").unlink()
    with pytest.raises(DataError, match="class 'n02' in .* has 4 images, not 5"):
        mini_imagenet.read(tmp_path, **SIZES)


def test_damaged_files_are_named(tmp_path):
    _listed(tmp_path)
    image = tmp_path / "images" / "n09_1.jpg"
    image.write_bytes(image.read_bytes()[:300])
    with pytest.raises(DataError, match=r"image \S*n09_1\.jpg cannot be read"):
        mini_imagenet.read(tmp_path, **SIZES)
    image.unlink()
    with pytest.raises(DataError, match=r"image \S*n09_1\.jpg cannot be read .*No such file"):
        mini_imagenet.read(tmp_path, **SIZES)
    (tmp_path / "val.csv").write_text("file,class\na.jpg,n09\n")
    with pytest.raises(DataError, match=r"val\.csv must have the columns filename and label"):
        mini_imagenet.read(tmp_path, **SIZES)


@pytest.mark.parametrize(
    "data, message",
    [
        ({"data": np.zeros((2, 84, 84, 3), np.uint8)}, "must hold image_data and class_dict"),
        ({"labels": [0]}, "must hold image_data and class_dict"),
        ([1], "must hold image_data and class_dict"),
        ({"data": np.zeros((2, 84, 84, 3), np.uint8), "labels": [0]}, "must hold"),
        ({"image_data": np.zeros((2, 84, 84, 3), np.uint8), "class_dict": {"n01": [2]}}, "must hold"),
    ],
)
def test_pickles_of_another_kind_are_named(tmp_path, data, message):
    (tmp_path / "train.pickle").write_bytes(pickle.dumps(data))
    with pytest.raises(DataError, match=rf"train\.pickle {message}.*replace it"):
        mini_imagenet.read(tmp_path, classes=1, train=1, test=1)


def test_images_of_another_kind_are_named(tmp_path):
    for images in (np.zeros((2, 84, 84, 3)), np.zeros((2, 84, 84), np.uint8)):
        (tmp_path / "train.pickle").write_bytes(pickle.dumps({"data": images, "labels": [0, 0]}))
        with pytest.raises(DataError, match="not uint8, H x W x 3"):
            mini_imagenet.read(tmp_path, classes=1, train=1, test=1)


def _fetched(monkeypatch, fetch):
    """Replaces the network by a function of (url, folder, file name)."""
    asked = []

    def download_url(url, root, filename=None, md5=None, **more):
        asked.append(url)
        fetch(url.rpartition("/")[2], root)

    monkeypatch.setattr("torchvision.datasets.utils.download_url", download_url)
    return asked


def test_download_is_complete_or_removed(tmp_path, monkeypatch):
    monkeypatch.delenv("CFL_DATA", raising=False)
    source = tmp_path / "source"
    source.mkdir()
    _cached_by_learn2learn(source)

    def broken(name, root):
        (tmp_path / "mini-imagenet.part").mkdir(exist_ok=True)
        if "validation" in name:
            raise OSError("no route to host")

    _fetched(monkeypatch, broken)
    with pytest.raises(DataError, match="'mini-imagenet' cannot be fetched from https://zenodo.*no route.* by hand"):
        datasets.load("mini-imagenet", tmp_path, download=True)
    assert not (tmp_path / "mini-imagenet").exists()
    with pytest.raises(DataError, match=r"looked at \S*mini-imagenet\.npz and \S*mini-imagenet\. .*--download"):
        datasets.load("mini-imagenet", tmp_path)

    def copied(name, root):
        (tmp_path / "mini-imagenet.part").mkdir(exist_ok=True)
        assert root == str(tmp_path / "mini-imagenet.part")
        (tmp_path / "mini-imagenet.part" / name).write_bytes((source / name).read_bytes())

    asked = _fetched(monkeypatch, copied)
    with pytest.raises(DataError, match="has 4 classes of Mini-ImageNet, not 100"):
        datasets.load("mini-imagenet", tmp_path, download=True)
    assert asked == [
        f"{mini_imagenet.ADDRESS}/mini-imagenet-cache-{part}.pkl" for part in ("train", "validation", "test")
    ]
    _assert_holds(mini_imagenet.read(tmp_path / "mini-imagenet", **SIZES), ORDER)


def _hundred(root, name, side, classes=100):
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (classes * 3, side, side, 3), dtype=np.uint8)
    y = np.arange(classes * 3) % classes
    cut = classes * 2
    np.savez(root / f"{name}.npz", x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])
    return x, y


BENCHMARKS = {  # data set, side, mean and deviation: of FOT's code; of the train images
    "split-mini-imagenet": (
        "mini-imagenet",
        84,
        (0.47313006, 0.44905752, 0.40378186),
        (0.27292014, 0.26559181, 0.27953038),
    ),
    "split-tiny-imagenet100": ("tiny-imagenet100", 64, (0.4743, 0.4473, 0.4061), (0.2797, 0.2703, 0.2847)),
}


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_stream_has_twenty_tasks_of_five_classes(tmp_path, benchmark):
    name, side, mean, std = BENCHMARKS[benchmark]
    x, y = _hundred(tmp_path, name, side)
    stream = streams.build(benchmark, data_root=tmp_path, class_order="natural")
    assert (len(stream), stream.multi_head, stream.input_shape) == (20, True, (3, side, side))
    for number, task in enumerate(stream.tasks):
        classes = range(5 * number, 5 * number + 5)
        assert (task.name, task.classes) == ("classes " + " ".join(map(str, classes)), 5)
        for part in (task.train, task.test):
            assert [5 * number + target for target in part.targets.tolist()] == y[part.index].tolist()
        assert task.train.index.tolist() == [row for row in range(200) if y[row] in classes]
        assert task.test.index.tolist() == [row for row in range(200, 300) if y[row] in classes]
    task = stream.tasks[7]
    found, _ = task.train.gather(torch.tensor([3]))
    raw = x[task.train.index[3]] / 255
    assert np.allclose(found[0].permute(1, 2, 0).numpy(), (raw - mean) / std, atol=1e-5)
    cut = streams.build(benchmark, tasks=2, data_root=tmp_path, class_order="natural")
    assert [task.name for task in cut.tasks] == [task.name for task in stream.tasks[:2]]
    with pytest.raises(ConfigError, match=rf"tasks must be in \[1, 20\] for '{benchmark}', not 21"):
        streams.build(benchmark, tasks=21, data_root=tmp_path)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_stream_of_fewer_classes_is_refused(tmp_path, benchmark):
    name, *_ = BENCHMARKS[benchmark]
    _hundred(tmp_path, name, 8, classes=60)
    with pytest.raises(DataError, match=rf"data set '{name}' has train images of 60 classes, not 100"):
        streams.build(benchmark, data_root=tmp_path)
