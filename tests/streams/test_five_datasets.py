"""5-Datasets: five data sets of ten classes as tasks of one stream, each with its own pool and normalisation."""

import numpy as np
import pytest
import torch

import cfl
from cfl import streams
from cfl.assembly.resolve import dump, load, resolve
from cfl.config.presets import preset
from cfl.core import ConfigError, DataError
from cfl.models import build as build_model
from cfl.streams import with_public
from tests import toy

ORDER = ("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist")
MEAN = {  # of FOT's code, in units of the image in [0, 1]
    "cifar10": (125.3 / 255, 123.0 / 255, 113.9 / 255),
    "mnist": (0.1,) * 3,
    "svhn": (0.4377, 0.4438, 0.4728),
    "fashion-mnist": (0.2190,) * 3,
    "notmnist": (0.4254,) * 3,
}
STD = {
    "cifar10": (63.0 / 255, 62.1 / 255, 66.7 / 255),
    "mnist": (0.2752,) * 3,
    "svhn": (0.198, 0.201, 0.197),
    "fashion-mnist": (0.3318,) * 3,
    "notmnist": (0.4501,) * 3,
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Small copies of the five, of 20 + i train and 10 + i test images each."""
    monkeypatch.delenv("CFL_DATA", raising=False)
    for number, name in enumerate(ORDER):
        _save(tmp_path, name, number)
    return tmp_path


def _save(root, name, number=0, side=None):
    shape = (32, 32, 3) if name in ("cifar10", "svhn") else (side or 28,) * 2
    draws = np.random.default_rng(number)
    x = {part: draws.integers(0, 256, (count + number, *shape), dtype=np.uint8) for part, count in _COUNTS.items()}
    y = {part: np.arange(len(images)) % 10 for part, images in x.items()}
    np.savez(root / f"{name}.npz", **{f"x_{part}": x[part] for part in x}, **{f"y_{part}": y[part] for part in y})
    return x["train"]


_COUNTS = {"train": 20, "test": 10}


def test_tasks_are_the_data_sets_in_the_order_of_the_code(root):
    stream = streams.build("five-datasets", data_root=root)
    assert [task.name for task in stream.tasks] == list(ORDER)
    assert (stream.multi_head, stream.input_shape) == (True, (3, 32, 32))
    for number, task in enumerate(stream.tasks):
        assert (len(task.train), len(task.test), task.classes) == (20 + number, 10 + number, 10)
        assert task.train.index.tolist() == list(range(20 + number))
        assert task.test.index.tolist() == list(range(20 + number, 30 + 2 * number))
        assert task.train.targets.tolist() == [row % 10 for row in range(20 + number)]
        assert task.test.targets.tolist() == [row % 10 for row in range(10 + number)]
    assert len({id(task.train.pool) for task in stream.tasks}) == 5


@pytest.mark.parametrize("name", ORDER)
def test_images_are_padded_then_normalised_by_their_own_data_set(root, name):
    raw = _save(root, name, ORDER.index(name))
    task = streams.build("five-datasets", tasks=(name,), data_root=root).tasks[0]
    found, _ = task.train.gather(torch.tensor([4]))
    image = raw[4] / 255
    if image.ndim == 2:  # two black pixels on each side, and the same in each channel
        image = np.repeat(np.pad(image, 2)[:, :, None], 3, axis=2)
    expected = (image - MEAN[name]) / STD[name]
    assert np.allclose(found[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)
    if raw.ndim == 3:
        assert torch.allclose(found[0, :, 0, 0], torch.tensor(-MEAN[name][0] / STD[name][0]))  # black, normalised


def test_grey_images_are_in_memory_once_and_larger_ones_keep_their_size(root):
    pool = streams.build("five-datasets", tasks=("mnist",), data_root=root).tasks[0].train.pool
    assert pool.images.shape == (32, 3, 32, 32)  # 21 train and 11 test images
    assert pool.images.untyped_storage().nbytes() == 32 * 32 * 32  # one channel in memory
    raw = _save(root, "notmnist", side=32)  # as in HAT's code
    pool = streams.build("five-datasets", tasks=("notmnist",), data_root=root).tasks[0].train.pool
    assert (pool.images[:20, 1].numpy() == raw).all()


def test_streams_of_some_tasks(root):
    first = streams.build("five-datasets", tasks=2, data_root=root)
    assert [task.name for task in first.tasks] == ["cifar10", "mnist"]
    chosen = streams.build("five-datasets", tasks=["notmnist", "cifar10"], data_root=root)
    assert [task.name for task in chosen.tasks] == ["notmnist", "cifar10"]  # in the order of the argument
    for tasks, message in [
        (0, r"tasks must be in \[1, 5\] for 'five-datasets', not 0"),
        (6, r"tasks must be in \[1, 5\] for 'five-datasets', not 6"),
        (("svhm",), r"unknown task of 'five-datasets' 'svhm'; did you mean 'svhn'"),
        (("mnist", "mnist"), "each once"),
        ((), "at least one"),
    ]:
        with pytest.raises(ConfigError, match=message):
            streams.build("five-datasets", tasks=tasks, data_root=root)


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits", "iris", "mnist"])
def test_other_benchmarks_refuse_names(name):
    with pytest.raises(
        ConfigError, match=rf"tasks must be a number for '{name}', whose tasks have no names, not \['a'\]"
    ):
        streams.build(name, tasks=("a",))


def test_missing_data_set_is_named_with_the_remedies(root):
    (root / "svhn.npz").unlink()
    with pytest.raises(DataError) as error:
        streams.build("five-datasets", data_root=root)
    rest = "or leave out svhn: --set tasks=[cifar10,mnist,fashion-mnist,notmnist]"
    for part in ("'svhn' not found", str(root / "svhn.npz"), "--download", rest):
        assert part in str(error.value)
    stream = streams.build("five-datasets", tasks=("cifar10", "mnist", "fashion-mnist", "notmnist"), data_root=root)
    assert len(stream) == 4
    (root / "mnist.npz").write_bytes(b"broken")
    with pytest.raises(DataError) as error:
        streams.build("five-datasets", data_root=root)
    rest = "or leave out mnist and svhn: --set tasks=[cifar10,fashion-mnist,notmnist]"
    for part in ("mnist.npz cannot be read", rest):
        assert part in str(error.value)
    with pytest.raises(DataError) as error:
        streams.build("five-datasets", tasks=("svhn",), data_root=root)
    assert "leave out" not in str(error.value)  # nothing would be left


def test_images_larger_than_those_of_the_tasks_are_refused(root):
    for side in (33, 40):
        _save(root, "mnist", side=side)
        with pytest.raises(DataError) as error:
            streams.build("five-datasets", tasks=("mnist", "cifar10"), data_root=root)
        assert str(error.value) == (
            f"images of data set 'mnist' are {side} x {side}, larger than the 32 x 32 of 'five-datasets'; resize them; "
            "or leave out mnist: --set tasks=[cifar10]"
        )


def test_public_data_are_not_those_of_a_task(root):
    stream = streams.build("five-datasets", tasks=("cifar10", "mnist"), data_root=root)
    for name in ("cifar10", "mnist"):
        with pytest.raises(ConfigError, match=f"public data '{name}' is the data set of the clients"):
            with_public(stream, name, data_root=root)
    assert len(with_public(stream, "svhn", data_root=root).public) == 34  # 22 train and 12 test images


def test_moving_and_augmenting_keep_the_pools(root):
    stream = streams.build("five-datasets", tasks=2, data_root=root).to("cpu").with_augment(["crop"])
    for task in stream.tasks:
        assert task.train.pool is task.test.pool and task.train.augment == ("crop",)
    x, _ = stream.tasks[1].train.gather(torch.arange(3), key=0)
    assert x.shape == (3, 3, 32, 32)


def test_rounds_follow_the_names_of_the_tasks():
    config = resolve("five-datasets", overrides=["tasks=[cifar10,mnist,fashion-mnist,notmnist]"])
    assert config.tasks == ("cifar10", "mnist", "fashion-mnist", "notmnist")
    # appendix F of FOT
    assert config.rounds == {"cifar10": 1000, "mnist": 100, "svhn": 200, "fashion-mnist": 100, "notmnist": 100}
    assert load(dump(config)) == config
    assert resolve("five-datasets", overrides=["rounds.svhn=7"]).rounds["svhn"] == 7
    assert resolve("five-datasets", overrides=["rounds=3"]).rounds == 3
    with pytest.raises(ConfigError, match="rounds lists 3 numbers for 2 tasks"):
        resolve("five-datasets", overrides=["tasks=[mnist,svhn]", "rounds=[1,2,3]"])
    for wrong in ("tasks=0", "tasks=[1,2]", "tasks={mnist: 1}", "rounds={mnist: 0}"):
        with pytest.raises(ConfigError, match=r"tasks|rounds"):
            resolve("five-datasets", overrides=[wrong])


def test_a_run_takes_the_rounds_of_its_tasks(root):
    few = ["tasks=[mnist,cifar10]", "rounds={cifar10: 2, mnist: 1, svhn: 9}", "cohort=2", "partition.clients=2"]
    config = resolve("five-datasets", overrides=[*few, "model.width=2", "local.batch_size=10"])
    recorder = toy.recording(cfl.Strategy)()
    result = cfl.run(config, strategy=recorder, data_root=root)
    assert [(info.task, info.round) for info, *_ in recorder.rounds] == [(0, 0), (1, 0), (1, 1)]
    assert result.accuracy_matrix.shape == (2, 2)


PRESETS = {
    # clients, cohort, tasks, FOT's first threshold, EWC's strength, width, stride of the stem, norm, augmentation
    "five-datasets": (150, 64, 5, 0.95, 1, 20, 1, False, ()),
    "split-mini-imagenet": (50, 25, 20, 0.9, 0.01, 32, 2, True, ("crop", "flip")),
    # ours: the same number of images a client as Mini-ImageNet, and half of the clients a round
    "split-tiny-imagenet100": (10, 5, 20, 0.9, 0.01, 32, 2, True, ("crop", "flip")),
}


MODELS = {  # side of an image, outputs of all heads, parameters: of FOT's code (Table 8's networks)
    "five-datasets": (32, 50, 1_122_140),
    "split-mini-imagenet": (84, 100, 3_025_440),
    # four halvings rounded up, and one of the average rounded down: 84 pixels end as 3 x 3, 64 pixels as 2 x 2
    "split-tiny-imagenet100": (64, 100, 3_025_440 - 100 * (2304 - 1024)),
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_papers_settings(name):
    clients, cohort, tasks, threshold, strength, width, stride, norm, augment = PRESETS[name]
    config = resolve(name, method="fot")
    assert (config.partition.clients, config.cohort, config.tasks, config.local.augment) == (
        clients,
        cohort,
        tasks,
        augment,
    )
    local = config.local
    assert (local.epochs, local.batch_size, local.lr, local.momentum, local.weight_decay) == (1, 16, 0.01, 0.0, 1e-5)
    assert (config.strategy["threshold"], config.strategy["threshold_step"]) == (threshold, 0.001)
    assert resolve(name, method="ewc").strategy["strength"] == strength
    assert resolve(name, method="er").strategy["memory"] == 1
    options = {"stem_stride": 1, "norm": False, **config.model.options}
    assert options == {"width": width, "stem_stride": stride, "norm": norm}
    side, outputs, parameters = MODELS[name]
    model = build_model("resnet18", (3, side, side), outputs, config.model.options)
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert model(torch.zeros(2, 3, side, side)).shape == (2, outputs)
    if name != "five-datasets":
        assert config.rounds == 250
    assert set(preset(name)["variants"]["scale"]) == {"small", "smoke"}
