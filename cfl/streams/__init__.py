"""Streams of tasks: the built-in benchmarks, streams from tensors or Avalanche benchmarks, and dealing to clients.

Built-in benchmarks register as this package is imported; Avalanche and torchvision are imported when one is built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from cfl.errors import ConfigError, DataError
from cfl.plugins import benchmarks
from cfl.streams.datasets import Arrays, digits, load, pooled
from cfl.streams.partition import Deal, deal
from cfl.streams.store import Part, Pool, Stream, Task, assemble

__all__ = ["Benchmark", "Deal", "Part", "Pool", "Stream", "Task", "build", "deal", "from_tensors"]

_FOT = "FOT (Bakman et al., ICLR 2024), section 5 and appendix F"
_DIGITS = "scikit-learn, load_digits (no paper)"


@dataclass(frozen=True)
class Benchmark:
    """A named stream; register an instance in `cfl.plugins.benchmarks`.

    build: (tasks, seed, data_root, download, class_order) -> Stream, with tasks None for the benchmark's own number;
    summary: one line; source: paper and section.
    """

    build: Callable[[int | None, int, Path | None, bool, str], Stream]
    summary: str
    source: str


def build(
    name: str,
    *,
    tasks: int | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
    class_order: str = "random",
) -> Stream:
    """The stream of a registered benchmark.

    tasks: number of first tasks (default: the benchmark's own); data_root: folder of the data sets, else CFL_DATA;
    download: fetch what is missing; class_order: "random" (by seed) or "natural", for streams that split the classes.
    Raises ConfigError for an unknown name or a value out of range, DataError for missing or damaged data.
    """
    return benchmarks.get(name).build(tasks, seed, data_root, download, class_order)


def from_tensors(
    tasks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]], name: str = "custom", multi_head: bool = False
) -> Stream:
    """A stream of your own tensors.

    tasks: (x_train, y_train, x_test, y_test) of each task: x (n, C, H, W) or (n, d), uint8 (scaled to [0, 1] later) or
    floating-point (taken as float32); y (n,) integer labels.
    multi_head: one head a task, whose labels become 0, 1, ...; otherwise one head for all labels of all tasks.
    Raises DataError for parts without samples, unequal lengths or shapes, and negative labels.
    """
    images, samples, start = [], [], 0
    for number, arrays in enumerate(tasks):
        found: list[Tensor] = []
        for x, y, which in ((*arrays[:2], "train"), (*arrays[2:], "test")):
            if y.dim() != 1 or len(x) != len(y) or y.is_floating_point():
                raise DataError(
                    f"{which} labels of task {number} are {y.dtype} of shape {tuple(y.shape)} for {len(x)} samples; "
                    "give one integer a sample"
                )
            images.append(x)
            found += [torch.arange(start, start + len(x)), y.cpu().long()]
            start += len(x)
        samples.append((found[0], found[1], found[2], found[3]))
    return assemble(name, images, samples, multi_head)


def _permuted(name: str, arrays: Arrays, pool: Pool, tasks: int, seed: int, source: str) -> Stream:
    from cfl.streams import avalanche

    if tasks < 1:
        raise ConfigError(f"tasks must be at least 1, not {tasks}")
    return avalanche.permuted(name, arrays, tasks, seed=seed, pool=pool, source=source)


def _split(
    name: str, arrays: Arrays, pool: Pool, tasks: int | None, groups: int, seed: int, class_order: str, source: str
) -> Stream:
    from cfl.streams import avalanche

    keep = groups if tasks is None else tasks
    if not 1 <= keep <= groups:
        raise ConfigError(f"tasks must be in [1, {groups}] for '{name}', not {keep}")
    return avalanche.split(
        name, arrays, groups, seed=seed, class_order=class_order, pool=pool, keep=keep, source=source
    )


def _permuted_digits(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
    arrays = digits()
    return _permuted("permuted-digits", arrays, pooled(arrays), 5 if tasks is None else tasks, seed, _DIGITS)


def _split_digits(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
    arrays = digits()
    return _split("split-digits", arrays, pooled(arrays), tasks, 5, seed, class_order, _DIGITS)


def _permuted_mnist(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
    arrays = load("mnist", data_root, download)
    pool = pooled(arrays, mean=(0.1307,), std=(0.3081,))
    return _permuted("permuted-mnist", arrays, pool, 10 if tasks is None else tasks, seed, _FOT)


def _split_cifar100(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
    arrays = load("cifar100", data_root, download)
    pool = pooled(arrays, mean=(0.4914, 0.4824, 0.4467), std=(0.2471, 0.24353, 0.2616))
    return _split("split-cifar100", arrays, pool, tasks, 10, seed, class_order, _FOT)


for _name, _build, _source, _summary in (
    ("permuted-digits", _permuted_digits, _DIGITS, "digits of 8 x 8 pixels, pixels permuted"),
    ("split-digits", _split_digits, _DIGITS, "digits of 8 x 8 pixels, two classes a task"),
    ("permuted-mnist", _permuted_mnist, _FOT, "MNIST, pixels permuted, one head"),
    ("split-cifar100", _split_cifar100, _FOT, "CIFAR-100, ten classes a task, a head each"),
):
    benchmarks.register(_name)(Benchmark(build=_build, summary=_summary, source=_source))
