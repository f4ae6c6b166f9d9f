"""Benchmarks of one task: whole data sets and Iris, and their presets."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris

from cfl import streams
from cfl.assembly.resolve import resolve
from cfl.core import ConfigError
from cfl.core.plugins import benchmarks
from cfl.models import build as build_model
from tests import toy

# shape of an image, classes, clients, rounds of FedSOL's (MNIST to TissueMNIST) and FedProj's (CIFAR-100) settings;
# Fashion-MNIST, in no paper, as MNIST
WHOLE = {
    "mnist": ((1, 28, 28), 10, 100, 200),
    "fashion-mnist": ((1, 28, 28), 10, 100, 200),
    "cifar10": ((3, 32, 32), 10, 100, 300),
    "cifar100": ((3, 32, 32), 100, 50, 100),
    "svhn": ((3, 32, 32), 10, 100, 300),
    "cinic10": ((3, 32, 32), 10, 200, 300),
    "pathmnist": ((3, 28, 28), 9, 200, 200),
    "tissuemnist": ((1, 28, 28), 8, 200, 200),
}


def _save(root, name):
    (channels, height, width), classes, *_ = WHOLE[name]
    shape = (height, width) if channels == 1 else (height, width, channels)
    draws = np.random.default_rng(0)
    x = draws.integers(0, 256, (30, *shape), dtype=np.uint8)
    np.savez(root / f"{name}.npz", x_train=x[:20], y_train=np.arange(20) % 5, x_test=x[20:], y_test=np.arange(10) % 4)
    return x


@pytest.mark.parametrize("name", WHOLE)
def test_a_data_set_is_one_task_with_the_official_split(name, tmp_path):
    x = _save(tmp_path, name)
    stream = streams.build(name, data_root=tmp_path)
    shape, classes, *_ = WHOLE[name]
    (task,) = stream.tasks
    assert (stream.name, stream.input_shape, stream.multi_head, stream.public) == (name, shape, False, None)
    assert task.classes == classes  # of the data set; only five occur here
    assert task.train.index.tolist() == list(range(20)) and task.test.index.tolist() == list(range(20, 30))
    assert task.train.targets.tolist() == [i % 5 for i in range(20)]
    assert task.test.targets.tolist() == [i % 4 for i in range(10)]
    raw = x[20:] if shape[0] == 3 else x[20:, ..., None]
    mean, std = (np.broadcast_to(t.numpy().ravel(), shape[:1]) for t in (task.test.pool.mean, task.test.pool.std))
    expected = ((raw / 255 - mean) / std).transpose(0, 3, 1, 2)
    assert np.allclose(task.test.gather(torch.arange(10))[0].numpy(), expected, atol=1e-5)


def test_more_than_one_task_is_refused(tmp_path):
    _save(tmp_path, "mnist")
    assert len(streams.build("mnist", tasks=1, data_root=tmp_path)) == 1
    with pytest.raises(ConfigError, match="tasks must be 1 for 'mnist', .*not 2"):
        streams.build("mnist", tasks=2, data_root=tmp_path)
    with pytest.raises(ConfigError, match="tasks must be 1 for 'iris'"):
        streams.build("iris", tasks=3)


def test_iris_is_its_first_two_principal_components():
    stream = streams.build("iris")
    raw, labels = load_iris(return_X_y=True)
    (task,) = stream.tasks
    x, y = task.train.gather(torch.arange(150))
    assert y.tolist() == labels.tolist() and y.bincount().tolist() == [50, 50, 50]
    # brute force: eigenvectors of the covariance; their signs are arbitrary, so up to sign
    centred = raw - raw.mean(0)
    values, vectors = np.linalg.eigh(centred.T @ centred)
    expected = centred @ vectors[:, values.argsort()[::-1][:2]]
    assert np.allclose(np.abs(x.numpy()), np.abs(expected), atol=1e-5)
    for column in range(2):
        signs = np.sign(x.numpy()[:, column] * expected[:, column])
        assert len(set(signs)) == 1
    assert (task.classes, stream.input_shape, stream.multi_head, x.dtype) == (3, (2,), False, torch.float32)


def test_iris_signs_are_fixed():
    """scikit-learn 1.5 and later make the largest loading of each component positive: petal length, sepal width.

    With loadings of (0.36, -0.08, 0.86, 0.36) and (0.66, 0.73, -0.17, -0.08), the known ones of Iris, the first
    sample (5.1, 3.5, 1.4, 0.2), less the means (5.843, 3.057, 3.758, 1.199), lies at (-2.68, 0.32).
    """
    first = streams.build("iris").tasks[0].train.gather(torch.tensor([0]))[0][0]
    assert first.tolist() == pytest.approx([-2.684, 0.319], abs=1e-3)


def test_all_samples_of_iris_are_train_test_and_public_samples():
    stream = streams.build("iris")
    task, rows = stream.tasks[0], torch.arange(150)
    x, y = task.train.gather(rows)
    again, labels = task.test.gather(rows)
    public, none = stream.public.gather(rows)
    assert torch.equal(again, x) and torch.equal(labels, y) and torch.equal(public, x) and not none.any()
    assert not set(task.train.index.tolist()) & set(task.test.index.tolist())
    assert stream.public.pool is not task.train.pool


def test_iris_dealt_by_classes():
    stream, config = streams.build("iris"), resolve("iris")
    targets = stream.tasks[0].train.targets
    dealt = streams.deal(targets, 0, seed=0, **config.partition.model_dump())
    assert [targets[rows].tolist() for rows in dealt.rows] == [[label] * 50 for label in range(3)]


@pytest.mark.parametrize("name", WHOLE)
def test_presets_have_the_papers_settings(name):
    config = resolve(name)
    shape, classes, clients, rounds = WHOLE[name]
    assert benchmarks.get(name).source and benchmarks.get(name).summary
    assert (config.partition.name, config.partition.clients, config.rounds) == ("lda", clients, rounds)
    assert config.cohort == {50: 5, 100: 10, 200: 10}[clients]  # 0.1, 0.1 and 0.05 of the clients
    local = config.local
    if name == "cifar100":
        assert (local.optimizer, local.epochs, local.batch_size, local.lr) == ("adam", 20, 64, 0.001)
        assert (config.partition.alpha, config.partition.min_samples, local.augment) == (0.3, 15, ())
    else:
        assert (local.epochs, local.batch_size, local.lr, local.lr_decay) == (5, 50, 0.01, 0.99)
        assert (local.optimizer, local.momentum, local.weight_decay) == ("sgd", 0.9, 1e-5)
        assert (config.partition.alpha, config.partition.min_samples) == (0.1, 10)
        assert resolve(name, method="fedprox").regularizer["fedprox"]["mu"] == 1.0
    assert config.checkpoint_every == 20
    outputs = build_model(config.model.name, shape, classes, config.model.options).eval()(torch.zeros(2, *shape))
    assert outputs.shape == (2, classes)


def test_presets_augment_as_the_official_code():
    everything, moved = ("crop", "flip", "cutout"), ("crop", "flip")
    wanted = {"mnist": everything, "fashion-mnist": everything, "cifar10": everything, "svhn": moved, "cinic10": moved}
    wanted |= {"pathmnist": ("flip",), "tissuemnist": ("flip",)}
    assert {name: resolve(name).local.augment for name in wanted} == wanted


def test_presets_take_public_data_of_another_data_set():
    found = {name: resolve(name).public.name for name in WHOLE}
    assert found == {
        "mnist": "notmnist",
        "fashion-mnist": "notmnist",
        "cifar10": "cifar100",
        "cifar100": "tiny-imagenet100",
        "svhn": "cifar100",
        "cinic10": "cifar100",
        "pathmnist": None,
        "tissuemnist": None,
    }
    assert resolve("iris").public.name == "stream"  # its own


def test_preset_of_iris_has_the_settings_of_the_pilot_study():
    config = resolve("iris")
    assert (config.partition.name, config.partition.clients, config.cohort, config.rounds) == ("classes", 3, 3, 20)
    assert (config.local.epochs, config.local.batch_size, config.local.lr, config.local.momentum) == (5, 8, 0.01, 0.9)
    # MLP 2-32-32-3: 2 * 32 + 32, 32 * 32 + 32, 32 * 3 + 3 parameters
    model = build_model(config.model.name, (2,), 3, config.model.options)
    assert sum(p.numel() for p in model.parameters()) == 96 + 1056 + 99


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "train", "test"),
    [("mnist", 60000, 10000), ("fashion-mnist", 60000, 10000), ("cifar10", 50000, 10000), ("cifar100", 50000, 10000)],
)
def test_real_data_are_normalised_to_mean_0_and_deviation_1(name, train, test):
    toy.need_data(name)
    task = streams.build(name).tasks[0]
    assert (len(task.train), len(task.test)) == (train, test)
    assert task.train.targets.bincount().sum() == train and len(task.train.targets.unique()) == task.classes
    images, pool = task.train.pool.images[:train], task.train.pool
    for channel in range(images.shape[1]):
        counts = images[:, channel].flatten().bincount(minlength=256).double()  # exact moments of the bytes
        values = (torch.arange(256) / 255 - pool.mean[channel].item()) / pool.std[channel].item()
        mean = (counts * values).sum() / counts.sum()
        assert abs(mean) < 0.01
        assert abs(((counts * values**2).sum() / counts.sum() - mean**2).sqrt() - 1) < 0.01


@pytest.mark.data
@pytest.mark.parametrize("seed", range(3))
def test_lda_of_real_cifar10_keeps_cap_and_minimum(seed):
    toy.need_data("cifar10")
    targets = streams.build("cifar10").tasks[0].train.targets
    dealt = streams.deal(targets, 0, seed=seed, **resolve("cifar10").partition.model_dump())
    sizes = [len(rows) for rows in dealt.rows]
    assert len(sizes) == 100 and sum(sizes) == 50000 and min(sizes) >= 10
    # a client below 500 may still get all of one class, and nothing of later classes
    assert max(sizes) < 500 + 5000


@pytest.mark.parametrize("tasks", [-1, 0])
def test_a_number_of_tasks_below_one_is_refused(tasks):
    with pytest.raises(ConfigError, match=rf"tasks must be in \[1, 3\] for 'toy', not {tasks}$"):
        streams.selected(toy.stream(3), tasks)


def test_tasks_of_a_growing_stream_are_selected_from_the_first_one():
    """Tasks 0 and 2 alone would leave outputs without samples, and the reverse order heads of less than no classes."""
    stream = streams.with_scenario(toy.stream(3), "class")
    names = [task.name for task in stream.tasks]
    assert streams.selected(stream, names[:2]).heads == (2, 2)
    for other in ([names[0], names[2]], names[1::-1]):
        with pytest.raises(ConfigError, match="only its first tasks can be selected, in their order"):
            streams.selected(stream, other)
