"""Data that are not as they should be, and what `cfl` says; and data in other forms that are welcome."""

import io
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

import cfl
from cfl import from_tensors, streams
from cfl.core import ConfigError, DataError, plugins
from cfl.runtime.population import Population
from cfl.streams import Benchmark, Pool, Stream, Task, TaskSamples, deal, with_public
from cfl.streams.avalanche import from_benchmark
from cfl.streams.datasets import load
from tests import toy

X, Y = torch.arange(24.0).view(8, 3), torch.arange(8) % 2
IMAGES = torch.zeros(8, 1, 4, 4, dtype=torch.uint8)
TASK = (X, Y, X, Y)
POOL, ROWS = Pool(X), torch.arange(3)
NAMES = r"give .* of whole numbers, as numpy.unique\(names, return_inverse=True\)\[1\] makes of names"
NUMBERS = "give a tensor, an array or equally long lists, of real numbers"
FOUR = r"must be \(x_train, y_train, x_test, y_test\), not "


def spoilt(value: float, sample: int = 3) -> Tensor:
    x = X.clone()
    x[sample, 1] = value
    return x


def train(x: Any = X, y: Any = Y) -> Stream:
    """A stream whose second task has these train samples."""
    return from_tensors([TASK, (x, y, X, Y)])


def test(x: Any = X, y: Any = Y, **options: Any) -> Stream:
    """A stream whose second task has these test samples."""
    return from_tensors([TASK, (X, Y, x, y)], **options)


def dealt(name: str = "iid", **options: Any) -> list[int]:
    """Sizes of a partition of 100 samples of three classes to 5 clients, as task 1."""
    usual: dict[str, Any] = {"targets": torch.arange(100) % 3, "task": 1, "clients": 5, "seed": 0}
    return deal(**{**usual, "name": name, **options}).sizes.tolist()


def two(stream: Stream | None = None) -> tuple[TaskSamples, TaskSamples]:
    """Train and test samples of a task."""
    task = (stream or from_tensors([TASK])).tasks[0]
    return task.train, task.test


def stream(**fields: Any) -> Stream:
    return replace(from_tensors([TASK]), **fields)


# npz files


def arrays(**changed: Any) -> dict[str, Any]:
    usual = {"x_train": np.zeros((20, 4, 5), np.uint8), "y_train": np.arange(20) % 10}
    usual |= {"x_test": np.zeros((10, 4, 5), np.uint8), "y_test": np.arange(10)}
    return {name: value for name, value in {**usual, **changed}.items() if value is not None}


def archive(**changed: Any) -> bytes:
    """The bytes of an npz file."""
    file = io.BytesIO()
    np.savez(file, **arrays(**changed))
    return file.getvalue()


def entries(**changed: bytes) -> bytes:
    """The bytes of a zip file with these entries beside the arrays."""
    file = io.BytesIO(archive(**{name: None for name in changed}))
    with zipfile.ZipFile(file, "a") as made:
        for name, content in changed.items():
            made.writestr(f"{name}.npy", content)
    return file.getvalue()


def vast() -> bytes:
    """The header of an array of 10^14 bytes, without them."""
    file = io.BytesIO()
    header = {"descr": "|u1", "fortran_order": False, "shape": (10**13, 2, 5)}
    np.lib.format.write_array_header_1_0(file, header)
    return file.getvalue()


def unclosed() -> bytes:
    """The header of an array, with a list that does not end."""
    text = b"{'descr': (}    \n"
    return np.lib.format.magic(1, 0) + len(text).to_bytes(2, "little") + text


def npz(content: bytes, name: str = "mnist") -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        (folder / f"{name}.npz").write_bytes(content)
        return load(name, folder)

    return read


def file_as_folder(place: str, name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text("no folder")
        return load(name, folder)

    return read


def csv_in_another_encoding(folder: Path) -> Any:
    (folder / "mini-imagenet").mkdir()
    (folder / "mini-imagenet" / "train.csv").write_bytes(b"\xff\xfe")
    return load("mini-imagenet", folder)


# Avalanche


class Own(Dataset):
    """A data set of a user, with these samples and targets."""

    def __init__(self, samples: Any, targets: Any) -> None:
        self.samples, self.targets = samples, targets

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        return self.samples[place], self.targets[place]


def held(x: Any = X, y: Any = Y) -> Any:
    """An Avalanche data set over tensors."""
    data = TensorDataset(x, y)
    data.targets = y.tolist()  # type: ignore[attr-defined]
    return _classification(data)


def own(samples: Any = None, targets: Any = None) -> Any:
    return _classification(Own(list(X) if samples is None else samples, Y.tolist() if targets is None else targets))


def _classification(data: Any) -> Any:
    from avalanche.benchmarks.utils import as_classification_dataset

    return as_classification_dataset(data)


def avalanche(train: Any = None, test: Any = None, **options: Any) -> Stream:
    """A stream from an Avalanche benchmark of one task."""
    train, test = (held() if data is None else data for data in (train, test))
    from avalanche.benchmarks import benchmark_from_datasets

    return from_benchmark(benchmark_from_datasets(train=[train], test=[test]), **options)


def duck(*experiences: Any) -> Any:
    return SimpleNamespace(train_stream=list(experiences), test_stream=list(experiences))


def registered(item: Any) -> Stream:
    """What the benchmark of that name builds; it is not kept."""
    plugins.benchmarks.register("misused")(item)
    try:
        return streams.build("misused")
    finally:
        plugins.benchmarks._items.pop("misused", None)


def built(tasks: Any, seed: Any, data_root: Any, download: Any, class_order: Any) -> Any:
    return [TASK]


CASES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    # from_tensors: the list of tasks
    "tasks None": (lambda: from_tensors(None), ConfigError, "from_tensors: tasks must be a list.*not None"),
    "tasks a number": (lambda: from_tensors(3), ConfigError, "tasks must be a list.*not 3"),
    "no tasks": (lambda: from_tensors([]), DataError, "has no task; give at least one"),
    "no tasks in a generator": (lambda: from_tensors(task for task in ()), DataError, "no task; give at least one"),
    "one task, no list": (lambda: from_tensors(TASK), DataError, f"task 0 {FOUR}.*Tensor.*a list of tasks"),
    "three parts": (lambda: from_tensors([TASK, TASK[:3]]), DataError, f"task 1 {FOUR}a tuple of 3 Tensor"),
    "five parts": (lambda: from_tensors([(*TASK, X)]), DataError, f"task 0 {FOUR}a tuple of 5 Tensor"),
    "pairs": (lambda: from_tensors([((X, Y), (X, Y))]), DataError, f"task 0 {FOUR}a tuple of 2 tuple"),
    "task None": (lambda: from_tensors([TASK, None]), DataError, f"task 1 {FOUR}None"),
    "task a text": (lambda: from_tensors(["abcd"]), DataError, f"task 0 {FOUR}'abcd'"),
    "tasks a text": (lambda: from_tensors("abcd"), DataError, f"task 0 {FOUR}'a'"),
    "tasks a dict": (lambda: from_tensors({"a": TASK}), DataError, f"task 0 {FOUR}'a'"),
    "task a data set": (lambda: from_tensors([TensorDataset(X, Y)]), DataError, f"task 0 {FOUR}.*TensorDataset"),
    "tasks one tensor": (lambda: from_tensors(torch.zeros(2, 4, 8, 3)), DataError, f"task 0 {FOUR}.*Tensor"),
    "tasks one array": (lambda: from_tensors(np.zeros((2, 4, 8, 3))), DataError, f"task 0 {FOUR}.*ndarray"),
    "name a number": (lambda: test(name=5), ConfigError, "from_tensors: name must be a string, not 5"),
    "name None": (lambda: test(name=None), ConfigError, "name must be a string, not None"),
    "multi_head a text": (lambda: test(multi_head="yes"), ConfigError, "multi_head must be True or False, not 'yes'"),
    "multi_head a number": (lambda: test(multi_head=2), ConfigError, "multi_head must be True or False, not 2"),
    # from_tensors: samples
    "x None": (lambda: train(None), DataError, f"train samples of task 1 are None; {NUMBERS}"),
    "x a text": (lambda: train("x.npy"), DataError, f"train samples of task 1 are 'x.npy'; {NUMBERS}"),
    "x 0-d": (lambda: train(torch.tensor(1.0)), DataError, r"train samples of task 1 have shape \(\); give \(n, d\)"),
    "x a number": (lambda: train(1.5), DataError, r"train samples of task 1 have shape \(\)"),
    "x 1-d": (lambda: test(X[:, 0]), DataError, r"test samples of task 1 have shape \(8,\); give \(n, d\)"),
    "x without numbers": (lambda: train(X[:, :0]), DataError, r"train samples of task 1 have shape \(8, 0\)"),
    "x ragged": (lambda: train([[1.0], [1.0, 2.0]]), DataError, f"train samples of task 1 are a list of 2.*{NUMBERS}"),
    "x complex": (lambda: train(X.to(torch.complex64)), DataError, f"task 1 are .*complex64; {NUMBERS}"),
    "x complex array": (lambda: train(X.numpy() * 1j), DataError, f"task 1 are .*complex64; {NUMBERS}"),
    "x texts": (lambda: train(np.full((8, 3), "a")), DataError, f"task 1 are .*<U1; {NUMBERS}"),
    "x objects": (lambda: train(np.full((8, 3), None)), DataError, f"task 1 are .*object; {NUMBERS}"),
    "x dates": (lambda: train(np.zeros((8, 3), "M8[s]")), DataError, f"task 1 are .*datetime64.*; {NUMBERS}"),
    "x on no device": (lambda: train(X.to("meta")), DataError, f"task 1 are .*{NUMBERS}"),
    "x a data set": (lambda: train(TensorDataset(X, Y)), DataError, f"task 1 are .*TensorDataset; {NUMBERS}"),
    "no train samples": (lambda: train(X[:0], Y[:0]), DataError, "task 'task 1' has no train samples; leave it out"),
    "no test samples": (lambda: test(X[:0], Y[:0]), DataError, "task 'task 1' has no test samples; leave it out"),
    "other shapes": (
        lambda: from_tensors([TASK, (X[:, :2], Y, X[:, :2], Y)]),
        DataError,
        r"train samples of task 1 of stream 'custom' are .*\(2,\), and train samples of task 0 .*\(3,\); bring all",
    ),
    "other kinds": (
        lambda: from_tensors([TASK, (X, Y, X.byte(), Y)]),
        DataError,
        "test samples of task 1 .* are torch.uint8 .*, and train samples of task 0 torch.float32 .*; bring all",
    ),
    "NaN to train": (
        lambda: train(spoilt(float("nan"))),
        DataError,
        r"train sample 3 of task 'task 1' of stream 'custom' .* NaN .*\(1 of 8 samples do\); replace it, or leave",
    ),
    "infinity to test": (
        lambda: test(spoilt(float("inf"), 5)),
        DataError,
        "test sample 5 of task 'task 1' .* infinite .*; replace it",
    ),
    "infinities of both signs": (
        lambda: train(torch.cat([spoilt(-torch.inf)[:4], spoilt(torch.inf, 6)[4:]])),
        DataError,
        r"train sample 3 of task 'task 1' .*\(2 of 8 samples do\)",
    ),
    "NaN with a head a task": (
        lambda: test(spoilt(float("nan"), 0), multi_head=True),
        DataError,
        "test sample 0 of task 'classes 0 1' .* NaN",
    ),
    "beyond float32": (lambda: train(X.double() * 1e300), DataError, "train sample 0 of task 'task 1' .* in float32"),
    # from_tensors: labels
    "y None": (lambda: train(y=None), DataError, "train labels of task 1 are None"),
    "y 0-d": (
        lambda: train(y=torch.tensor(1)),
        DataError,
        r"train labels of task 1 .*\(\) for 8 samples; give one int",
    ),
    "y shorter": (
        lambda: train(y=Y[:3]),
        DataError,
        r"train labels of task 1 .*\(3,\) for 8 samples; give one integer",
    ),
    "y longer": (lambda: test(X[:3]), DataError, r"test labels of task 1 .*\(8,\) for 3 samples; give one integer"),
    "y one-hot": (lambda: train(y=torch.eye(8)), DataError, r"train labels of task 1 .*\(8, 8\) .*; give one integer"),
    "y fractions": (lambda: train(y=Y + 0.5), DataError, r"train labels of task 1 .*, not 0.5 \(sample 0\); number"),
    "y NaN": (lambda: train(y=Y / 0 * 0), DataError, r"train labels of task 1 .*, not nan \(sample 0\)"),
    "y texts": (lambda: train(y=["cat", "dog"] * 4), DataError, f"labels of task 1 are a list of 8 str; {NAMES}"),
    "y complex": (lambda: train(y=Y * 1j), DataError, "train labels of task 1 are .*complex"),
    "y negative": (lambda: test(y=-Y), DataError, r"test labels of task 1 must be 0, 1, .*, not -1 \(sample 1\)"),
    "y negative, a head a task": (
        lambda: from_tensors([(X, -Y, X, -Y)], multi_head=True),
        DataError,
        r"train labels of task 0 .*, not -1 \(sample 1\); number them so",
    ),
    "label 10^9": (
        lambda: train(y=Y * 10**9),
        DataError,
        "1000000001 classes for 16 train samples .*train label 1000000000 of task 'task 1', sample 1.*; number the cl",
    ),
    "label 3,000,000 to test": (
        lambda: test(y=Y * 3_000_000),
        DataError,
        "3000001 classes .*test label 3000000 of task 'task 1', sample 1.*multi_head=True",
    ),
    "label of no train sample": (
        lambda: test(y=Y + 1),
        DataError,
        r"test label 2 of task 'task 1' \(sample 1\) of stream 'custom' has no train sample.*; add some, or leave",
    ),
    "label of another task's train samples, a head a task": (
        lambda: from_tensors([(X, Y, X, Y), (X, Y + 2, X, Y + 1)], multi_head=True),
        DataError,
        r"test label 0 of task 'classes 1 2 3' \(sample 0\)",  # label 1 is the first of its head
    ),
    # from_tensors: public data
    "public empty": (
        lambda: test(public=X[:0]),
        DataError,
        "public data of stream 'custom' have no samples; give some",
    ),
    "clients an array": (
        lambda: test(clients=np.zeros(8, int)),
        DataError,
        "clients are given for 8 of 2 tasks; give an array for each task",
    ),
    "public a pair": (lambda: test(public=(X, Y)), DataError, f"public inputs are a tuple of 2 Tensor; {NUMBERS}"),
    "public a name": (lambda: test(public="stream"), DataError, f"public inputs are 'stream'; {NUMBERS}"),
    "public 1-d": (lambda: test(public=X[:, 0]), DataError, r"public inputs have shape \(8,\); give \(n, d\)"),
    "public of another shape": (lambda: test(public=X[:, :2]), DataError, r"public data .*shape \(2,\), not \(3,\)"),
    "public of another kind": (lambda: test(public=X.byte()), DataError, "public inputs are torch.uint8 .*convert"),
    "public NaN": (
        lambda: test(public=spoilt(float("nan"))),
        DataError,
        "public sample 3 of the public data of stream 'custom' .* NaN",
    ),
    # Pool, TaskSamples, Task, Stream
    "pool of a list": (lambda: Pool([[1.0]]), ConfigError, "Pool.images must be a Tensor, not a list"),
    "pool of an array": (lambda: Pool(X.numpy()), ConfigError, "Pool.images must be a Tensor, not .*ndarray"),
    "pool of float64": (
        lambda: Pool(X.double()),
        DataError,
        "images of a pool must be uint8 or float32, not .*float64",
    ),
    "pool of numbers": (lambda: Pool(torch.zeros(5)), DataError, r"must be \(N, C, H, W\) or \(N, d\), not \(5,\)"),
    "mean a number": (lambda: Pool(X, mean=0.5), ConfigError, "Pool.mean must be a Tensor or None, not 0.5"),
    "mean of another shape": (lambda: Pool(X, torch.zeros(7)), DataError, r"mean .* broadcasts .*\(3,\).*\(7,\)"),
    "mean NaN": (lambda: Pool(X, torch.tensor(torch.nan)), DataError, "mean of a pool must be finite.*nan"),
    "std 0": (lambda: Pool(X, std=torch.zeros(3)), DataError, "std of a pool must be finite and not 0"),
    "samples of no pool": (lambda: TaskSamples(X, ROWS, ROWS), ConfigError, "TaskSamples.pool must be a Pool"),
    "index a list": (lambda: TaskSamples(POOL, [0], [0]), ConfigError, "TaskSamples.index must be a Tensor"),
    "index float": (lambda: TaskSamples(POOL, ROWS.float(), ROWS), DataError, "index and targets are .*make both"),
    "targets float": (lambda: TaskSamples(POOL, ROWS, ROWS.float()), DataError, "index and targets are .*make both"),
    "index beyond": (lambda: TaskSamples(POOL, ROWS + 6, ROWS), DataError, r"index lies in \[6, 8\]; .* rows 0 to 7"),
    "index negative": (lambda: TaskSamples(POOL, ROWS - 1, ROWS), DataError, r"index lies in \[-1, 1\]"),
    "permutation short": (lambda: TaskSamples(POOL, ROWS, ROWS, ROWS[:2]), DataError, "permutation .* 0 to 2 once"),
    "permutation twice": (lambda: TaskSamples(POOL, ROWS, ROWS, ROWS * 0), DataError, "permutation .*torch.randperm"),
    "augment a text": (
        lambda: stream().with_augment("crop"),
        ConfigError,
        "with_augment: kinds must be a list.*'crop'",
    ),
    "augment None": (lambda: stream().with_augment(None), ConfigError, "kinds must be a list.*None"),
    "augment numbers": (lambda: stream().with_augment([5]), ConfigError, "kinds must be a list .*each a string"),
    "task's name": (lambda: Task(5, *two(), 2), ConfigError, "Task.name must be a string, not 5"),
    "task's train": (lambda: Task("a", X, two()[1], 2), ConfigError, "Task.train must be a TaskSamples"),
    "task's classes a text": (lambda: Task("a", *two(), "2"), ConfigError, "Task.classes must be a whole number"),
    "task's classes too few": (
        lambda: Task("a", *two(), 1),
        DataError,
        r"train target 1 of task 'a' \(sample 1\) is no class of its head; map targets to 0..0 or give",
    ),
    "task's classes 10^9": (
        lambda: stream(tasks=(Task("a", *two(), 10**9),)),
        DataError,
        "head of 1000000000 classes for 8 train samples",
    ),
    "stream's tasks": (lambda: stream(tasks=Task("a", *two(), 2)), ConfigError, "Stream.tasks must be a list .*a Task"),
    "stream's tasks None": (lambda: stream(tasks=None), ConfigError, "Stream.tasks must be a list .*None"),
    "stream's tasks numbers": (lambda: stream(tasks=(1,)), ConfigError, "Stream.tasks must be a list .*of 1 int"),
    "stream's shape": (lambda: stream(input_shape=3), ConfigError, "Stream.input_shape must be a list .*not 3"),
    "stream's other shape": (lambda: stream(input_shape=(4,)), DataError, r"shape \(3,\), not \(4,\); bring all"),
    "stream's public": (lambda: stream(public=X), ConfigError, "Stream.public must be a TaskSamples or None"),
    "stream to nowhere": (lambda: stream().to("gpu"), ConfigError, "device='gpu' is no device .*use 'cpu' or 'cuda'"),
    # build and Benchmark
    "build a number": (lambda: streams.build(5), ConfigError, "build: name must be a string, not 5"),
    "build a list": (lambda: streams.build(["mnist"]), ConfigError, "build: name must be a string, not a list"),
    "build a misspelt name": (lambda: streams.build("permutd-digits"), ConfigError, "did you mean 'permuted-digits'"),
    "tasks True": (
        lambda: streams.build("iris", tasks=True),
        ConfigError,
        "build: tasks must be a whole number .*True",
    ),
    "tasks a fraction": (lambda: streams.build("iris", tasks=2.5), ConfigError, "tasks must be a whole number .*2.5"),
    "tasks a name": (lambda: streams.build("five-datasets", tasks="mnist"), ConfigError, "or a list .*not 'mnist'"),
    "tasks of numbers": (
        lambda: streams.build("five-datasets", tasks=[5]),
        ConfigError,
        "tasks must be .*each a string",
    ),
    "tasks twice": (
        lambda: streams.build("five-datasets", tasks=["mnist", "mnist"]),
        ConfigError,
        "must name at least one task, each once",
    ),
    "tasks 10^9": (lambda: streams.build("permuted-digits", tasks=10**9), ConfigError, r"tasks must be in \[1, 1000\]"),
    "seed a text": (
        lambda: streams.build("iris", seed="a"),
        ConfigError,
        "build: seed must be a whole number, not 'a'",
    ),
    "seed None": (lambda: streams.build("split-digits", seed=None), ConfigError, "seed must be a whole number"),
    "data_root a number": (
        lambda: streams.build("mnist", data_root=5),
        ConfigError,
        "data_root must be a path or a str",
    ),
    "class_order None": (lambda: streams.build("iris", class_order=None), ConfigError, "class_order must be a string"),
    "class_order unknown": (
        lambda: streams.build("permuted-digits", class_order="sorted"),
        ConfigError,
        "unknown class order 'sorted'; known: natural, random",
    ),
    "benchmark without build": (lambda: Benchmark(None, "a", "b"), ConfigError, "Benchmark.build must be a function"),
    "benchmark of no arguments": (
        lambda: Benchmark(lambda: None, "a", "b"),
        ConfigError,
        r"Benchmark.build must take \(tasks, seed, data_root, download, class_order\): too many",
    ),
    "benchmark a function": (
        lambda: registered(built),
        ConfigError,
        "benchmark 'misused' must be a Benchmark, not .*function",
    ),
    "benchmark of a list": (
        lambda: registered(Benchmark(built, "a", "b")),
        DataError,
        "benchmark 'misused' must build a cfl.Stream, not a list of 1 tuple",
    ),
    # with_public
    "public for no stream": (
        lambda: with_public("cifar10", "mnist"),
        ConfigError,
        "with_public: stream must be a Stream",
    ),
    "public for None": (lambda: with_public(None, "mnist"), ConfigError, "stream must be a Stream, not None"),
    "public of a number": (lambda: with_public(stream(), 5), ConfigError, "with_public: name must be a string"),
    "public of a tensor": (lambda: with_public(stream(), X), ConfigError, "with_public: name must be a string"),
    "public of an unknown set": (lambda: with_public(stream(), "mnits"), ConfigError, "did you mean 'mnist'"),
    "public samples a fraction": (
        lambda: with_public(stream(), "mnist", samples=2.5),
        ConfigError,
        "with_public: samples must be a whole number or None, not 2.5",
    ),
    "public samples 0": (lambda: with_public(stream(), "mnist", samples=0), ConfigError, "samples must be at least 1"),
    "public seed a text": (
        lambda: with_public(stream(), "mnist", seed="x"),
        ConfigError,
        "seed must be a whole number",
    ),
    "public download a text": (
        lambda: with_public(stream(), "mnist", download="no"),
        ConfigError,
        "download must be True or False, not 'no'",
    ),
    # deal, and a run's partition
    "targets a list": (lambda: dealt(targets=[0, 1]), ConfigError, "deal: targets must be a Tensor"),
    "targets of a partition float": (
        lambda: dealt(targets=torch.zeros(9)),
        DataError,
        r"targets of task 1 are .*; give \(N,\) int64",
    ),
    "targets 2-d": (lambda: dealt(targets=torch.zeros(9, 2).long()), DataError, r"targets of task 1 .*\(9, 2\)"),
    "targets empty": (lambda: dealt("sharding", targets=Y[:0]), DataError, r"targets of task 1 .*\(0,\)"),
    "number of a task a text": (lambda: dealt(task="a"), ConfigError, "deal: task must be a whole number"),
    "partition a number": (lambda: dealt(5), ConfigError, "deal: name must be a string"),
    "partition unknown": (lambda: dealt("dirichle"), ConfigError, "did you mean 'dirichlet'"),
    "clients 0": (lambda: dealt(clients=0), ConfigError, "clients must be positive"),
    "clients a fraction": (lambda: dealt(clients=2.5), ConfigError, "deal: clients must be a whole number, not 2.5"),
    "clients a text": (lambda: dealt(clients="5"), ConfigError, "deal: clients must be a whole number, not '5'"),
    "clients True": (lambda: dealt(clients=True), ConfigError, "deal: clients must be a whole number, not True"),
    "clients 10^10": (lambda: dealt("dirichlet", clients=10**10), ConfigError, "clients must be .*at most 1e.08"),
    "more clients than samples": (
        lambda: dealt(clients=101),
        DataError,
        "task 1: 100 samples cannot be dealt to 101 owners; lower partition.clients",
    ),
    "too many shards": (lambda: dealt("shards", shards=10**12), DataError, "task 1: 100 .*; lower partition.shards"),
    "too many shards of a class": (lambda: dealt("sharding", shards=99), DataError, "task 1: .*class 0.*; lower"),
    "shards a fraction": (lambda: dealt("shards", shards=2.5), ConfigError, "deal: shards must be a whole number"),
    "alpha a text": (lambda: dealt("dirichlet", alpha="a"), ConfigError, "deal: alpha must be a number, not 'a'"),
    "alpha None": (lambda: dealt("lda", alpha=None), ConfigError, "deal: alpha must be a number, not None"),
    "alpha NaN": (lambda: dealt("lda", alpha=float("nan")), ConfigError, "alpha must be positive.*nan"),
    "alpha infinite": (lambda: dealt("dirichlet", alpha=float("inf")), ConfigError, "alpha must be .*at most 1e.300"),
    "alpha beyond floats": (
        lambda: dealt("lda", alpha=1e308),
        ConfigError,
        "alpha must be .*at most 1e.300, not 1e.308",
    ),
    "alpha below floats": (lambda: dealt("lda", alpha=1e-300), DataError, "task 1: .*raise partition.alpha"),
    "share a text": (lambda: dealt(task_share="1"), ConfigError, "deal: task_share must be a number"),
    "share NaN": (lambda: dealt(task_share=float("nan")), ConfigError, r"task_share must be in \(0, 1\], not nan"),
    "share of nobody": (lambda: dealt(task_share=1e-9), ConfigError, "leaves no owner; raise either"),
    "seed a fraction": (lambda: dealt(seed=1.5), ConfigError, "deal: seed must be a whole number"),
    "a run of too many clients": (
        lambda: Population(toy.stream(), toy.config("partition.clients=2000000000")),
        ConfigError,
        "clients must be positive and at most 1e.08",
    ),
    "a run of more clients than samples": (
        lambda: Population(toy.stream(), toy.config("partition.clients=49")),
        DataError,
        "task 0: 48 samples cannot be dealt to 49 owners; lower partition.clients",
    ),
    # files of data sets
    "load a number": (lambda: load(5), ConfigError, "load: name must be a string, not 5"),
    "load a list": (lambda: load(["mnist"]), ConfigError, "load: name must be a string, not a list"),
    "load from a number": (lambda: load("mnist", 5), ConfigError, "load: data_root must be a path or a string"),
    "npz a text": (npz(b"hello\n" * 99), DataError, r"mnist\.npz cannot .*no npz archive.*add --download, or .*savez"),
    "npz empty": (npz(b""), DataError, r"mnist\.npz cannot .*no npz archive"),
    "npz truncated": (npz(archive()[:500]), DataError, r"mnist\.npz cannot .*or only a part of one; delete it"),
    "npz without its end": (npz(archive()[:-30]), DataError, r"mnist\.npz cannot .*or only a part of one"),
    "npz without --download": (
        npz(b"text", "tiny-imagenet100"),
        DataError,
        r"tiny-imagenet100\.npz .*; write it with numpy.savez from x_train, y_train, x_test, y_test$",
    ),
    "npz a folder": (
        lambda tmp_path: ((tmp_path / "mnist.npz").mkdir(), load("mnist", tmp_path)),
        DataError,
        r"mnist\.npz cannot .*no npz archive",
    ),
    "npz a pickle": (npz(b"\x80\x04}."), DataError, r"mnist\.npz cannot .*no npz archive"),
    "npz without an array": (
        npz(archive(y_test=None)),
        DataError,
        "no array y_test; it must hold .*, not x_test, x_tr",
    ),
    "npz without arrays": (npz(archive(**dict.fromkeys(arrays()))), DataError, "no array x_train; .*, not nothing"),
    "npz of objects": (npz(archive(x_train=np.full(20, None))), DataError, "array x_train of .*damaged or no array"),
    "npz of garbage": (npz(entries(x_train=b"garbage")), DataError, "array x_train of .*damaged or no array"),
    "npz of an open header": (npz(entries(x_train=unclosed())), DataError, "array x_train of .*damaged or no array"),
    "npz too large": (npz(entries(x_train=vast())), DataError, "array x_train of .*damaged or no array"),
    "npz of floats": (
        npz(archive(x_train=np.zeros((20, 4, 5)))),
        DataError,
        "x_train .*float64 .*must be uint8, N x H",
    ),
    "npz of a number": (npz(archive(x_train=np.uint8(3))), DataError, r"x_train .*shape \(\); it must be uint8, N x H"),
    "npz of no pixels": (
        npz(archive(x_train=np.zeros((20, 0, 5), np.uint8))),
        DataError,
        r"x_train .*shape \(20, 0, 5\); it must be",
    ),
    "npz of channels first": (
        npz(archive(x_train=np.zeros((20, 3, 4, 5), np.uint8))),
        DataError,
        r"x_train .*\(20, 3, 4, 5\); it must be uint8, N x H x W or N x H x W x 3",
    ),
    "npz of one label": (npz(archive(y_train=3)), DataError, r"y_train .*shape \(\); it must be N integers"),
    "npz of texts": (npz(archive(y_train=np.full(20, "a"))), DataError, "y_train .*<U1 .*must be N integers"),
    "npz of one-hot labels": (npz(archive(y_train=np.eye(20, 10, dtype=int))), DataError, r"y_train .*\(20, 10\)"),
    "npz of too large labels": (npz(archive(y_train=np.arange(20))), DataError, r"y_train .*0\.\.9, first 10 at 10"),
    "npz of negative labels": (npz(archive(y_test=-np.arange(10))), DataError, r"y_test .*0\.\.9, first -1 at 1"),
    "notMNIST a file": (file_as_folder("notmnist", "notmnist"), DataError, "notmnist.*unpack it again"),
    "Mini-ImageNet a file": (
        file_as_folder("mini-imagenet", "mini-imagenet"),
        DataError,
        "'mini-imagenet' in .*cannot",
    ),
    "Mini-ImageNet not in UTF-8": (csv_in_another_encoding, DataError, "'mini-imagenet' in .*cannot be read .*utf-8"),
    "CINIC-10 a file": (file_as_folder("cinic-10", "cinic10"), DataError, "'cinic10' in .*unpack it again"),
    "MNIST's folder a file": (file_as_folder("MNIST/raw", "mnist"), DataError, "'mnist' in .*--download fetches it"),
    "data root a file": (
        lambda tmp_path: load("mnist", tmp_path / "nothing"),
        DataError,
        "'mnist' not found; looked at",
    ),
    # Avalanche
    "benchmark None": (
        lambda: from_benchmark(None),
        ConfigError,
        "from_benchmark: benchmark must be an Avalanche .*None",
    ),
    "benchmark a name": (lambda: from_benchmark("SplitMNIST"), ConfigError, "must be an Avalanche .*'SplitMNIST'"),
    "benchmark a list": (lambda: from_benchmark([1]), ConfigError, "train_stream and test_stream, not a list of 1 int"),
    "benchmark a cfl stream": (
        lambda: from_benchmark(stream()),
        ConfigError,
        "Avalanche .*Stream; give tensors to from",
    ),
    "benchmark of no streams": (
        lambda: from_benchmark(SimpleNamespace(train_stream=None, test_stream=None)),
        ConfigError,
        "with train_stream and test_stream",
    ),
    "benchmark of nothing": (lambda: from_benchmark(duck()), DataError, "has no task; give at least one"),
    "benchmark of numbers": (
        lambda: from_benchmark(duck(1)),
        DataError,
        "train samples of task 0 .*not an Avalanche data",
    ),
    "benchmark of torch's data sets": (
        lambda: from_benchmark(duck(SimpleNamespace(dataset=TensorDataset(X, Y)))),
        DataError,
        "train samples of task 0 of benchmark 'custom' are .*TensorDataset.*as_classification_dataset",
    ),
    "benchmark's name": (lambda: avalanche(name=5), ConfigError, "from_benchmark: name must be a string"),
    "benchmark's heads": (lambda: avalanche(multi_head="yes"), ConfigError, "multi_head must be True or False or None"),
    "Avalanche NaN": (lambda: avalanche(held(spoilt(torch.nan))), DataError, "train sample 3 of task 'task 0' .*NaN"),
    "Avalanche infinity": (
        lambda: avalanche(test=held(spoilt(torch.inf))),
        DataError,
        "test sample 3 of task 'task 0'",
    ),
    "Avalanche complex": (
        lambda: avalanche(held(X.to(torch.complex64))),
        DataError,
        "train samples of task 0 of benchmark 'custom' are .*complex64",
    ),
    "Avalanche 1-d": (lambda: avalanche(held(X[:, 0])), DataError, r"train samples of task 0 .*shape \(8,\)"),
    "Avalanche shapes": (
        lambda: avalanche(test=held(X[:, :2])),
        DataError,
        r"test samples of task 0 .*\(2,\), and train",
    ),
    "Avalanche ragged": (
        lambda: avalanche(own([x[: 1 + place % 3] for place, x in enumerate(X)])),
        DataError,
        "train samples of task 0 of benchmark 'custom' differ in shape; add a resize",
    ),
    "Avalanche arrays": (
        lambda: avalanche(own(list(X.numpy()))),
        DataError,
        r"train samples of task 0 of benchmark 'custom' are ndarray, not tensors; .*ToTensor\(\)",
    ),
    "Avalanche None": (
        lambda: avalanche(own([None] * 8)),
        DataError,
        "train samples of task 0 .*NoneType, not tensors",
    ),
    "Avalanche empty": (
        lambda: avalanche(own([], [])),
        DataError,
        "train samples of task 0 .*are none; leave the task",
    ),
    "Avalanche texts": (lambda: avalanche(own(targets=["a"] * 8)), DataError, "train labels of task 0 .*list of 8 str"),
    "Avalanche fractions": (
        lambda: avalanche(own(targets=[0.5] * 8)),
        DataError,
        r"train labels of task 0 .*0.5 \(sam",
    ),
    "Avalanche negative": (lambda: avalanche(held(y=-Y)), DataError, r"train labels of task 0 .*not -1 \(sample 1\)"),
    "Avalanche 10^9": (lambda: avalanche(held(y=Y * 10**9)), DataError, "train label 1000000000 of task 'task 0'"),
    "Avalanche unseen": (lambda: avalanche(test=held(y=Y + 1)), DataError, "test label 2 of task 'task 0' .*no train"),
}


def equal(made: Stream) -> bool:
    """The stream is that of `TASK`."""
    whole = torch.arange(8)
    return all(
        torch.equal(x, X) and x.dtype == torch.float32 and torch.equal(y, Y)
        for x, y in (part.gather(whole) for part in two(made))
    )


def arrays_of(kind: str, labels: str = "int64") -> list[Any]:
    return [part.numpy().astype(kind if place % 2 == 0 else labels) for place, part in enumerate(TASK)]


WELCOME: dict[str, Callable[[], Any]] = {
    "arrays": lambda: equal(from_tensors([arrays_of("float32")])),
    "arrays of float64": lambda: equal(from_tensors([arrays_of("float64")])),
    "arrays of whole numbers": lambda: equal(from_tensors([arrays_of("int32", "uint16")])),
    "arrays in the other order of bytes": lambda: equal(from_tensors([arrays_of(">f4", ">i8")])),
    "arrays that cannot be written to": lambda: from_tensors([(np.broadcast_to(np.float32(1), (8, 3)), Y, X, Y)]),
    "arrays with negative strides": lambda: equal(
        from_tensors([(X.flip(0).numpy()[::-1], Y.flip(0).numpy()[::-1], X, Y)])
    ),
    "lists": lambda: equal(from_tensors([[part.tolist() for part in TASK]])),
    "lists of tensors": lambda: equal(from_tensors([(list(X), list(Y), X, Y)])),
    "a generator": lambda: equal(from_tensors(task for task in [TASK])),
    "a tuple of lists": lambda: equal(from_tensors(([X, Y, X, Y],))),
    "float64, float16 and bfloat16": lambda: equal(
        from_tensors([(X.double(), Y, X.half(), Y), (X.bfloat16(), Y, X.short(), Y)])
    ),
    "uint8 arrays are images": lambda: (
        from_tensors([(IMAGES.numpy(), Y, IMAGES, Y)]).tasks[0].train.pool.images.dtype == torch.uint8
    ),
    "labels of any whole type": lambda: equal(from_tensors([(X, Y.bool(), X, Y.byte()), (X, Y.float(), X, Y.int())])),
    "labels in a column": lambda: equal(from_tensors([(X, Y[:, None], X, Y[:, None].numpy())])),
    "tensors with gradients": lambda: equal(from_tensors([(X.clone().requires_grad_(), Y, X, Y)])),
    "sparse tensors": lambda: equal(from_tensors([(X.to_sparse(), Y, X, Y)])),
    "public arrays": lambda: len(test(public=X.double().numpy()).public) == 8,
    "public lists": lambda: len(test(public=X.tolist()).public) == 8,
    "labels with gaps": lambda: from_tensors([(X, Y * 999, X, Y * 999)]).tasks[0].classes == 1000,
    "test labels that another task trains, one head": lambda: from_tensors([(X, Y, X, Y + 1), (X, Y + 1, X, Y)]),
    "large labels, a head a task": lambda: (
        test(multi_head=True, name="a")
        and from_tensors([(X, Y * 10**9, X, Y * 10**9)], multi_head=True).tasks[0].classes == 2
    ),
    "NumPy's numbers": lambda: dealt(clients=np.int64(5), alpha=np.float32(0.5), seed=np.int32(0)) == dealt(),
    "NumPy's truth": lambda: test(multi_head=np.bool_(True)).multi_head,
    "tasks in a list": lambda: equal(stream(tasks=list(stream().tasks))),
    "the whole range of seeds": lambda: len(streams.build("split-digits", seed=2**128 - 1)) == 5,
    "Avalanche tensors as labels": lambda: equal(avalanche(own(targets=list(Y)))),
    "Avalanche float64": lambda: equal(avalanche(held(X.double()))),
    "cfl.from_tensors": lambda: equal(cfl.from_tensors([TASK], "a", False, None)),
}
