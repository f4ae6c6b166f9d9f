"""The streams of the built-in benchmarks, equal to those that Avalanche makes."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from cfl import streams
from cfl.core import ConfigError, DataError, rng
from cfl.core.plugins import benchmarks
from cfl.streams import tasks
from cfl.streams.datasets import Arrays, digits, load, pooled
from tests.toy import need_data


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


class Rows(torch.utils.data.Dataset):
    """A data set whose samples are (row, target): a benchmark made from it tells the rows of each task."""

    def __init__(self, targets):
        self.targets = targets.tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, row):
        return row, self.targets[row]


def read(experience):
    """Row to target of an experience over `Rows`."""
    dataset = experience.dataset
    return dict(zip((dataset[i][0] for i in range(len(dataset))), dataset.targets, strict=True))


def ours(samples, start):
    """Row of the data set to target, in ascending order of the rows; start: row of the pool where it begins."""
    rows = (samples.index - start).tolist()
    assert rows == sorted(rows)
    return dict(zip(rows, samples.targets.tolist(), strict=True))


def assert_equal(stream, benchmark, train_size):
    pairs = list(zip(benchmark.train_stream, benchmark.test_stream, strict=True))
    for task, (train, test) in zip(stream.tasks, pairs, strict=True):
        assert ours(task.train, 0) == read(train)
        assert ours(task.test, train_size) == read(test)


def arrays_of(classes, seed):
    """Seven train and three test samples of each class, in mixed order."""
    draws = torch.Generator().manual_seed(seed)
    y, y_test = (torch.arange(n * classes)[torch.randperm(n * classes, generator=draws)] % classes for n in (7, 3))
    return Arrays(torch.zeros(len(y), 2), y, torch.zeros(len(y_test), 2), y_test)


@pytest.mark.parametrize("seed", [0, 11, -1, 2**40 + 3, 2**64 + 5])
@pytest.mark.parametrize(("classes", "groups"), [(4, 2), (10, 5), (100, 20)])
def test_split_is_avalanches_own(classes, groups, seed):
    """Order of the classes, samples and targets. torch, and so Avalanche, takes seeds of 64 bits."""
    from avalanche.benchmarks import nc_benchmark

    arrays = arrays_of(classes, seed=classes)
    benchmark = nc_benchmark(
        Rows(arrays.y_train),
        Rows(arrays.y_test),
        n_experiences=groups,
        task_labels=True,
        seed=seed % 2**64,
        class_ids_from_zero_in_each_exp=True,
    )
    stream = tasks.split("d", arrays, groups, seed=seed, class_order="random", pool=pooled(arrays))
    assert_equal(stream, benchmark, len(arrays.y_train))
    order = benchmark.classes_order_original_ids
    assert [int(word) for task in stream.tasks for word in task.name.split()[1:]] == order


def test_split_in_natural_order_is_avalanches_own():
    from avalanche.benchmarks import nc_benchmark

    arrays = arrays_of(6, seed=0)
    options = dict(task_labels=True, fixed_class_order=list(range(6)), class_ids_from_zero_in_each_exp=True)
    benchmark = nc_benchmark(Rows(arrays.y_train), Rows(arrays.y_test), n_experiences=3, **options)
    stream = tasks.split("d", arrays, 3, seed=9, class_order="natural", pool=pooled(arrays))
    assert_equal(stream, benchmark, len(arrays.y_train))


def test_data_sets_one_after_another_are_avalanches_own():
    from avalanche.benchmarks import benchmark_from_datasets, task_incremental_benchmark
    from avalanche.benchmarks.utils import as_classification_dataset

    sets = {name: arrays_of(3, seed) for seed, name in enumerate(("one", "two"))}
    train, test = (
        [as_classification_dataset(Rows(y)) for y in labels]
        for labels in zip(*((one.y_train, one.y_test) for one in sets.values()), strict=True)
    )
    benchmark = task_incremental_benchmark(benchmark_from_datasets(train=train, test=test))
    stream = tasks.joined("d", {name: (one, pooled(one)) for name, one in sets.items()}, classes=3)
    assert_equal(stream, benchmark, 21)
    assert [task.name for task in stream.tasks] == ["one", "two"] and stream.multi_head
    repeated = tasks.permuted("d", sets["one"], 2, seed=0, pool=pooled(sets["one"]))
    assert_equal(repeated, benchmark_from_datasets(train=train[:1] * 2, test=test[:1] * 2), 21)


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
    for number in (0, -1):
        for name in ("split-digits", "permuted-digits"):
            with pytest.raises(ConfigError, match="tasks must be"):
                streams.build(name, tasks=number)
    with pytest.raises(ConfigError, match="class order"):
        streams.build("split-digits", class_order="sorted")
    arrays = digits()
    with pytest.raises(ConfigError, match="tasks 3 does not divide the 10 classes"):
        tasks.split("d", arrays, 3, seed=0, class_order="natural", pool=pooled(arrays))
    assert len(streams.build("permuted-digits", tasks=7)) == 7


def test_split_refuses_labels_that_the_train_samples_lack():
    whole = arrays_of(6, seed=0)

    def split(train, test):
        """The samples whose labels fulfil two conditions, in two tasks."""
        arrays = Arrays(
            whole.x_train[train(whole.y_train)],
            whole.y_train[train(whole.y_train)],
            whole.x_test[test(whole.y_test)],
            whole.y_test[test(whole.y_test)],
        )
        return tasks.split("d", arrays, 2, seed=0, class_order="natural", pool=pooled(arrays))

    stream = split(lambda y: y < 4, lambda y: y < 4)
    # 4 classes of 7 train and 3 test samples, 2 a task
    assert [(len(task.train), len(task.test), task.classes) for task in stream.tasks] == [(14, 6, 2)] * 2
    with pytest.raises(DataError, match=r"train labels of 'd' are 4 numbers from 0 to 5, .*; replace its files"):
        split(lambda y: (y != 2) & (y != 3), lambda y: y < 4)
    first = int((whole.y_test >= 4).nonzero()[0])
    message = rf"test label {whole.y_test[first]} of 'd' \(sample {first}\) has no train sample; replace its files"
    with pytest.raises(DataError, match=message):
        split(lambda y: y < 4, lambda y: y >= 0)


@pytest.mark.parametrize(
    ("name", "classes", "shape"), [("fashion-mnist", 10, (28, 28)), ("cifar100", 100, (32, 32, 3))]
)
def test_split_of_a_cut_file_is_refused(name, classes, shape, tmp_path):
    """Half of the classes among the train images; the test images have all or as many, and five or ten tasks fit."""
    y = np.arange(classes)
    for test in (y, y[: classes // 2]):
        train = y[: classes // 2]
        x_train, x_test = (np.zeros((len(labels), *shape), np.uint8) for labels in (train, test))
        np.savez(tmp_path / f"{name}.npz", x_train=x_train, y_train=train, x_test=x_test, y_test=test)
        with pytest.raises(
            DataError, match=f"'{name}' has train images of {classes // 2} classes, not {classes}; replace it"
        ):
            streams.build(f"split-{name}", data_root=tmp_path)


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
