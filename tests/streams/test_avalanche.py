"""Streams that Avalanche makes: the built-in benchmarks, and a user's own Avalanche benchmarks."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from cfl import streams
from cfl.core import ConfigError, DataError, rng
from cfl.core.plugins import benchmarks
from cfl.streams import avalanche
from cfl.streams.datasets import digits, load, pooled
from tests.toy import need_data


def _labels(part, source):
    return source[part.index]


def test_registered_benchmarks_name_a_registered_model():
    from cfl.config.presets import preset
    from cfl.core.plugins import models

    assert {"permuted-digits", "split-digits", "permuted-mnist", "split-cifar100"} <= set(benchmarks.names())
    for name in benchmarks.names():
        assert preset(name)["model"]["name"] in models.names()
        assert benchmarks.get(name).source and benchmarks.get(name).summary


def test_import_does_not_import_avalanche_or_torchvision():
    code = "import sys, cfl.streams; print({'avalanche', 'torchvision', 'sklearn'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


@pytest.mark.parametrize("order", ["random", "natural"])
def test_split_digits_deals_classes_to_tasks(order):
    stream, arrays = streams.build("split-digits", seed=3, class_order=order), digits()
    everything = torch.cat([arrays.y_train, arrays.y_test])
    assert len(stream) == 5 and stream.multi_head and stream.input_shape == (64,)
    seen = []
    for task in stream.tasks:
        classes = [int(word) for word in task.name.split()[1:]]
        for part, official in ((task.train, torch.arange(1400)), (task.test, torch.arange(1400, 1797))):
            # brute force: all official samples of these classes and no other; targets are places in the task's name
            wanted = [int(i) for i in official if int(everything[i]) in classes]
            assert part.index.tolist() == wanted
            assert [classes[y] for y in part.targets] == everything[part.index].tolist()
        seen += classes
    assert sorted(seen) == list(range(10)) and (seen == list(range(10))) == (order == "natural")


def test_split_random_order_is_avalanches_own():
    """Avalanche draws the order as torch.randperm after seeding with `seed`; each task takes the next two classes."""
    order = torch.randperm(10, generator=torch.Generator().manual_seed(11)).tolist()
    stream = streams.build("split-digits", seed=11)
    names = [{int(word) for word in task.name.split()[1:]} for task in stream.tasks]
    assert names == [set(order[2 * i : 2 * i + 2]) for i in range(5)]


def test_building_does_not_change_global_randomness():
    torch.manual_seed(5)
    np.random.seed(5)
    before, numpy_before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    streams.build("split-digits", seed=1)
    streams.build("permuted-digits", seed=1)
    assert torch.equal(before, torch.random.get_rng_state()) and (np.random.get_state()[1] == numpy_before).all()


@pytest.mark.parametrize("name", ["split-digits", "permuted-digits"])
def test_fewer_tasks_are_the_first_ones(name):
    whole, cut = streams.build(name, seed=2), streams.build(name, seed=2, tasks=2)
    assert len(cut) == 2
    for a, b in zip(whole.tasks, cut.tasks):
        assert (
            a.name == b.name
            and torch.equal(a.train.index, b.train.index)
            and torch.equal(a.test.targets, b.test.targets)
        )
        rows = torch.arange(10)
        assert torch.equal(a.train.gather(rows)[0], b.train.gather(rows)[0])


def test_number_of_tasks_is_checked():
    with pytest.raises(ConfigError, match=r"tasks must be in \[1, 5\]"):
        streams.build("split-digits", tasks=6)
    for tasks in (0, -1):
        for name in ("split-digits", "permuted-digits"):
            with pytest.raises(ConfigError, match="tasks must be"):
                streams.build(name, tasks=tasks)
    with pytest.raises(ConfigError, match="class order"):
        streams.build("split-digits", class_order="sorted")
    arrays = digits()
    with pytest.raises(ConfigError, match="tasks 3 does not divide the 10 classes"):
        avalanche.split("d", arrays, 3, seed=0, class_order="natural", pool=pooled(arrays))
    assert len(streams.build("permuted-digits", tasks=7)) == 7


def test_permuted_digits_permutes_the_same_samples():
    stream, arrays = streams.build("permuted-digits", seed=4), digits()
    assert len(stream) == 5 and not stream.multi_head
    pools = {id(part.pool) for task in stream.tasks for part in (task.train, task.test)}
    assert len(pools) == 1  # one copy of the images
    orders = set()
    for number, task in enumerate(stream.tasks):
        x, y = task.train.gather(torch.arange(1400))
        x_test, y_test = task.test.gather(torch.arange(397))
        order = rng.numpy_generator(rng.key(4, "permutation", number)).permutation(64) if number else np.arange(64)
        assert torch.equal(x, arrays.x_train[:, order]) and torch.equal(y, arrays.y_train)
        assert torch.equal(x_test, arrays.x_test[:, order]) and torch.equal(y_test, arrays.y_test)
        assert sorted(order) == list(range(64))
        orders.add(tuple(order))
    assert len(orders) == 5
    assert task.name == "permutation 4" and task.classes == 10


def _tensor_data():
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
    y = torch.arange(24) % 6
    train, test = TensorDataset(x[:18], y[:18]), TensorDataset(x[18:], y[18:])
    train.targets, test.targets = y[:18].tolist(), y[18:].tolist()
    return x, y, train, test


def _assert_holds(part, x, y, rows):
    """`part` has exactly these samples, in any order; every x is unique, so it says which label must be beside it."""
    found, labels = part.gather(torch.arange(len(part)))
    assert len(part) == len(rows)
    for sample, label in zip(found, labels, strict=True):
        row = [i for i in rows if torch.equal(x[i], sample)]
        assert len(row) == 1 and int(y[row[0]]) == int(label)


@pytest.mark.parametrize("from_zero", [True, False])
def test_from_benchmark_reads_class_splits_with_task_labels(from_zero):
    from avalanche.benchmarks import nc_benchmark

    x, y, train, test = _tensor_data()
    benchmark = nc_benchmark(train, test, 3, task_labels=True, shuffle=False, class_ids_from_zero_in_each_exp=from_zero)
    stream = avalanche.from_benchmark(benchmark, name="mine")
    assert (
        stream.multi_head
        and len(stream) == 3
        and stream.name == "mine"
        and [t.classes for t in stream.tasks] == [2] * 3
    )
    for number, task in enumerate(stream.tasks):
        rows = [i for i in range(24) if int(y[i]) // 2 == number]
        _assert_holds(task.train, x, y % 2, [i for i in rows if i < 18])
        _assert_holds(task.test, x, y % 2, [i for i in rows if i >= 18])
    assert len(stream.tasks[0].train.pool.images) == 24  # each shared data set is in memory once


def test_from_benchmark_without_task_labels_has_one_head():
    from avalanche.benchmarks import nc_benchmark

    x, y, train, test = _tensor_data()
    benchmark = nc_benchmark(train, test, 3, task_labels=False, shuffle=False)
    stream = avalanche.from_benchmark(benchmark)
    assert not stream.multi_head and [task.classes for task in stream.tasks] == [6] * 3
    _assert_holds(stream.tasks[2].train, x, y, [i for i in range(18) if int(y[i]) >= 4])
    assert avalanche.from_benchmark(benchmark, multi_head=True).multi_head


def test_from_benchmark_applies_evaluation_transforms_sample_by_sample():
    from avalanche.benchmarks import nc_benchmark

    x, y, train, test = _tensor_data()
    benchmark = nc_benchmark(
        train,
        test,
        2,
        task_labels=True,
        shuffle=False,
        train_transform=lambda sample: sample + torch.rand(3),  # augmentation: must not be applied
        eval_transform=lambda sample: 2 * sample,
    )
    stream = avalanche.from_benchmark(benchmark)
    for number, task in enumerate(stream.tasks):
        rows = [i for i in range(24) if int(y[i]) // 3 == number]
        _assert_holds(task.train, 2 * x, y % 3, [i for i in rows if i < 18])
        _assert_holds(task.test, 2 * x, y % 3, [i for i in rows if i >= 18])


def test_from_benchmark_reads_the_samples_that_a_users_data_set_returns():
    from avalanche.benchmarks import nc_benchmark

    class Doubled(TensorDataset):
        def __getitem__(self, index):
            image, label = super().__getitem__(index)
            return 2 * image, label

    x, y, train, test = _tensor_data()
    doubled = Doubled(*train.tensors)
    doubled.targets = train.targets
    stream = avalanche.from_benchmark(nc_benchmark(doubled, test, 2, task_labels=True, shuffle=False))
    _assert_holds(stream.tasks[0].train, 2 * x, y % 3, [i for i in range(18) if int(y[i]) < 3])


def test_from_benchmark_reads_tensor_benchmarks_and_plain_streams():
    from avalanche.benchmarks import benchmark_from_datasets, tensors_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset

    x, y, train, test = _tensor_data()
    parts = [(x[:18], y[:18]), (x[:18] + 9, y[:18])], [(x[18:], y[18:]), (x[18:] + 9, y[18:])]
    # task labels differ, but the classes are the same in both tasks: one head
    labelled = avalanche.from_benchmark(tensors_benchmark(*parts, task_labels=[0, 1]))
    plain = avalanche.from_benchmark(
        benchmark_from_datasets(train=[as_classification_dataset(train)], test=[as_classification_dataset(test)])
    )
    assert not labelled.multi_head and not plain.multi_head
    _assert_holds(labelled.tasks[1].train, x + 9, y, range(18))
    _assert_holds(labelled.tasks[1].test, x + 9, y, range(18, 24))
    _assert_holds(plain.tasks[0].test, x, y, range(18, 24))


def test_from_benchmark_names_samples_that_it_cannot_read():
    from avalanche.benchmarks import benchmark_from_datasets, nc_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset

    _, _, train, test = _tensor_data()
    data = [as_classification_dataset(part) for part in (train, test)]
    with pytest.raises(DataError, match="2 train and 1 test"):
        avalanche.from_benchmark(benchmark_from_datasets(train=[data[0], data[0]], test=[data[1]]))
    arrays = nc_benchmark(
        train, test, 2, task_labels=True, train_transform=torch.Tensor.numpy, eval_transform=torch.Tensor.numpy
    )
    with pytest.raises(DataError, match="'mine' are ndarray, not tensors; .*ToTensor"):
        avalanche.from_benchmark(arrays, name="mine")


@pytest.mark.data
def test_permuted_mnist_has_the_papers_sizes_and_normalisation():
    need_data("mnist")
    stream, arrays = streams.build("permuted-mnist", seed=0), load("mnist")
    assert [(len(t.train), len(t.test), t.classes) for t in stream.tasks] == [(60000, 10000, 10)] * 10
    assert stream.input_shape == (1, 28, 28)
    x, y = stream.tasks[0].train.gather(torch.arange(60000))
    assert torch.equal(y, arrays.y_train)
    # .1307 and .3081 are the mean and standard deviation of the training images, to four digits
    assert abs(x.mean().item()) < 1e-3 and abs(x.std().item() - 1) < 1e-3
    permuted = stream.tasks[9].train.gather(torch.arange(100))[0]
    order = rng.numpy_generator(rng.key(0, "permutation", 9)).permutation(784)
    assert torch.equal(permuted, x[:100].flatten(1)[:, order].view(100, 1, 28, 28))


@pytest.mark.data
def test_split_cifar100_has_the_papers_sizes():
    need_data("cifar100")
    stream = streams.build("split-cifar100", seed=0, class_order="natural")
    assert [(len(t.train), len(t.test), t.classes) for t in stream.tasks] == [(5000, 1000, 10)] * 10
    assert stream.tasks[3].name == "classes " + " ".join(map(str, range(30, 40)))
    x = torch.cat([task.train.gather(torch.arange(0, 5000, 10))[0] for task in stream.tasks])
    # CIFAR-100's own statistics are (.507, .487, .441) and (.267, .256, .276),
    # those used are CIFAR-10's: off by < .03 / .24 = .13 in the mean and 9 % in the standard deviation
    assert x.mean((0, 2, 3)).abs().max() < 0.15 and (x.std((0, 2, 3)) - 1).abs().max() < 0.15
