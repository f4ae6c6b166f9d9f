"""Streams from a user's own Avalanche benchmarks."""

import pytest
import torch
from torch.utils.data import TensorDataset

from cfl.core import DataError
from cfl.streams import avalanche


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


@pytest.mark.slow
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


def test_from_benchmark_applies_evaluation_transforms_of_labels_alone():
    from avalanche.benchmarks import benchmark_from_datasets
    from avalanche.benchmarks.utils import as_classification_dataset
    from avalanche.benchmarks.utils.transform_groups import TransformGroups

    x, y, train, test = _tensor_data()
    reverse = None, lambda label: 5 - int(label)
    groups = TransformGroups({"train": (None, None), "eval": reverse})
    parts = [as_classification_dataset(part, transform_groups=groups) for part in (train, test)]
    (task,) = avalanche.from_benchmark(benchmark_from_datasets(train=parts[:1], test=parts[1:])).tasks
    _assert_holds(task.train, x, 5 - y, range(18))  # y counts 0, ..., 5 over and over
    _assert_holds(task.test, x, 5 - y, range(18, 24))


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
