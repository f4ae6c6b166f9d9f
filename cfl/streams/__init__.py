"""Streams of tasks: the built-in benchmarks, streams from tensors or Avalanche benchmarks, and dealing to clients.

Built-in benchmarks register as this package is imported; Avalanche and torchvision are imported when one is built.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cfl.core.errors import ConfigError, DataError, unknown
from cfl.core.plugins import benchmarks
from cfl.streams.datasets import Arrays, classes, digits, iris, load, pooled
from cfl.streams.partition import Deal, deal
from cfl.streams.public import with_public
from cfl.streams.store import Pool, Stream, Task, TaskSamples, assemble, unlabelled

__all__ = ["Benchmark", "Deal", "TaskSamples", "Pool", "Stream", "Task", "build", "deal", "from_tensors", "with_public"]

_FOT = "FOT (Bakman et al., ICLR 2024), section 5 and appendix F"
_TINY = "none; the setting of FOT's Mini-ImageNet"
_DIGITS = "scikit-learn, load_digits (no paper)"
_FEDSOL = "FedSOL (Lee et al., CVPR 2024), Table 2"
_FEDPROJ = "FedProj (2025), Table 1"
_PILOT = "FedProj (2025), section 3, pilot study"


@dataclass(frozen=True)
class Benchmark:
    """A named stream; register an instance in `cfl.plugins.benchmarks`.

    build: (tasks, seed, data_root, download, class_order) -> Stream, with tasks None for the benchmark's own number;
    summary: one line; source: paper and section;
    names: of the tasks, where a run may choose among them: then `build` gets a number, None or a tuple of names.
    """

    build: Callable[[Any, int, Path | None, bool, str], Stream]
    summary: str
    source: str
    names: tuple[str, ...] = ()


def build(
    name: str,
    *,
    tasks: int | Sequence[str] | None = None,
    seed: int = 0,
    data_root: Path | None = None,
    download: bool = False,
    class_order: str = "random",
) -> Stream:
    """The stream of a registered benchmark.

    tasks: number of first tasks (default: the benchmark's own), or some of `Benchmark.names`, in the order wanted;
    data_root: folder of the data sets, else CFL_DATA;
    download: fetch what is missing; class_order: "random" (by seed) or "natural", for streams that split the classes.
    Raises ConfigError for an unknown name or a value out of range, DataError for missing or damaged data.
    """
    chosen = benchmarks.get(name)
    if tasks is not None and not isinstance(tasks, int):
        tasks = _named(tasks, name, chosen.names)
    return chosen.build(tasks, seed, data_root, download, class_order)


def _named(tasks: Sequence[str], name: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names of tasks, each once and of the benchmark; raises ConfigError for others."""
    if not known:
        raise ConfigError(f"tasks must be a number for '{name}', whose tasks have no names, not {list(tasks)}")
    for task in tasks:
        if task not in known:
            raise unknown(f"task of '{name}'", task, known)
    if not tasks or len(set(tasks)) < len(tasks):
        raise ConfigError(f"tasks of '{name}' must name at least one, and each once, not {list(tasks)}")
    return tuple(tasks)


def from_tensors(
    tasks: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    name: str = "custom",
    multi_head: bool = False,
    public: Tensor | None = None,
) -> Stream:
    """A stream of your own tensors.

    tasks: (x_train, y_train, x_test, y_test) of each task: x (n, C, H, W) or (n, d), uint8 (scaled to [0, 1] later) or
    floating-point (taken as float32); y (n,) integer labels.
    multi_head: one head a task, whose labels become 0, 1, ...; otherwise one head for all labels of all tasks.
    public: unlabelled inputs of the same shape and kind, for methods that distil.
    Raises DataError for parts without samples, unequal lengths, shapes or kinds, and negative labels.
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
    stream = assemble(name, images, samples, multi_head)
    if public is None:
        return stream
    if (public.dtype == torch.uint8) != (images[0].dtype == torch.uint8):
        raise DataError(f"public inputs are {public.dtype} and the tasks' are {images[0].dtype}; convert either")
    return replace(stream, public=unlabelled(Pool(public if public.dtype == torch.uint8 else public.float())))


def _one_task(name: str, arrays: Arrays, pool: Pool, heads: int, tasks: int | None, source: str) -> Stream:
    if tasks not in (None, 1):
        raise ConfigError(f"tasks must be 1 for '{name}', which is a single task, not {tasks}")
    count = len(arrays.y_train)
    train = TaskSamples(pool, torch.arange(count), arrays.y_train)
    test = TaskSamples(pool, torch.arange(count, len(pool.images)), arrays.y_test)
    return Stream(
        name, (Task(name, train, test, heads),), tuple(pool.images.shape[1:]), multi_head=False, source=source
    )


def _whole(name: str, mean: tuple[float, ...], std: tuple[float, ...], source: str) -> Benchmark:
    """The benchmark of a data set as one task; mean, std: of each channel, in units of the image scaled to [0, 1]."""

    def build(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
        arrays = load(name, data_root, download)
        return _one_task(name, arrays, pooled(arrays, mean, std), classes(name), tasks, source)

    return Benchmark(build, f"{name} as one task of {classes(name)} classes", source)


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


def _split_imagenet(
    name: str, arrays_name: str, mean: tuple[float, ...], std: tuple[float, ...], source: str
) -> Callable[[int | None, int, Path | None, bool, str], Stream]:
    """The builder of a hundred classes of ImageNet, five a task, as FOT has them."""

    def build(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
        arrays = load(arrays_name, data_root, download)
        found = len(torch.cat([arrays.y_train, arrays.y_test]).unique())
        if found != classes(arrays_name):
            raise DataError(f"data set '{arrays_name}' has {found} classes, not {classes(arrays_name)}; replace it")
        return _split(name, arrays, pooled(arrays, mean, std), tasks, 20, seed, class_order, source)

    return build


def _five(
    tasks: int | tuple[str, ...] | None, seed: int, data_root: Path | None, download: bool, class_order: str
) -> Stream:
    from cfl.streams import avalanche

    names = tasks if isinstance(tasks, tuple) else tuple(_FIVE)[:tasks]
    if isinstance(tasks, int) and not 1 <= tasks <= len(_FIVE):
        raise ConfigError(f"tasks must be in [1, {len(_FIVE)}] for 'five-datasets', not {tasks}")
    sets, missing = {}, {}
    for name in names:
        try:
            arrays = load(name, data_root, download)
        except DataError as error:
            missing[name] = error
        else:
            sets[name] = arrays, _coloured(pooled(arrays, *_FIVE[name]))
    if missing:
        rest = f"; or leave out {' and '.join(missing)}: --set tasks=[{','.join(sets)}]" if sets else ""
        raise DataError(f"{next(iter(missing.values()))}{rest}")
    return avalanche.joined("five-datasets", sets, classes=10, source=_FOT)


def _coloured(pool: Pool) -> Pool:
    """The pool with images of 3 x 32 x 32: black pixels around smaller ones, grey repeated (in memory only once)."""
    sides = [(32 - side) // 2 for side in pool.images.shape[2:]]
    padded = functional.pad(pool.images, (sides[1], sides[1], sides[0], sides[0]))
    return replace(pool, images=padded.expand(-1, 3, -1, -1))


def _iris(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
    arrays = iris()
    stream = _one_task("iris", arrays, pooled(arrays), 3, tasks, _PILOT)
    return replace(stream, public=unlabelled(Pool(arrays.x_train)))


# Means and deviations of each data set, of all channels where there is one number; those of MNIST and Fashion-MNIST are
# of images with the black pixels around them.
_FIVE: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "cifar10": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
    "mnist": ((0.1,), (0.2752,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "fashion-mnist": ((0.2190,), (0.3318,)),
    "notmnist": ((0.4254,), (0.4501,)),  # of images resized to 32 x 32, as HAT's and GPM's codes have them
}
_split_mini = _split_imagenet(
    "split-mini-imagenet",
    "mini-imagenet",
    (0.47313006, 0.44905752, 0.40378186),
    (0.27292014, 0.26559181, 0.27953038),
    _FOT,
)
_split_tiny = _split_imagenet(
    "split-tiny-imagenet100",
    "tiny-imagenet100",
    (0.4743, 0.4473, 0.4061),  # computed from the train part
    (0.2797, 0.2703, 0.2847),
    _TINY,
)

for _name, _build, _source, _summary in (
    ("permuted-digits", _permuted_digits, _DIGITS, "digits of 8 x 8 pixels, pixels permuted"),
    ("split-digits", _split_digits, _DIGITS, "digits of 8 x 8 pixels, two classes a task"),
    ("permuted-mnist", _permuted_mnist, _FOT, "MNIST, pixels permuted, one head"),
    ("split-cifar100", _split_cifar100, _FOT, "CIFAR-100, ten classes a task, a head each"),
    ("split-mini-imagenet", _split_mini, _FOT, "Mini-ImageNet, five classes a task, a head each"),
    ("split-tiny-imagenet100", _split_tiny, _TINY, "a hundred classes of Tiny ImageNet, five a task, a head each"),
    ("iris", _iris, _PILOT, "Iris in two principal components, 150 samples to train and the same to test"),
):
    benchmarks.register(_name)(Benchmark(build=_build, summary=_summary, source=_source))

benchmarks.register("five-datasets")(
    Benchmark(
        _five, "CIFAR-10, MNIST, SVHN, Fashion-MNIST and notMNIST, a task and a head each", _FOT, names=tuple(_FIVE)
    )
)

for _name, _mean, _std, _source in (
    ("mnist", (0.1307,), (0.3081,), _FEDSOL),  # FedSOL's code
    ("fashion-mnist", (0.2860,), (0.3530,), "Xiao et al., 2017 (no paper of a method)"),  # computed from the train part
    ("cifar10", (0.4914, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159), _FEDSOL),  # FedSOL's code
    ("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), _FEDPROJ),  # computed from the train part
    ("svhn", (0.43768, 0.44377, 0.4728), (0.19803, 0.20102, 0.19704), _FEDSOL),  # FedSOL's code
    ("cinic10", (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835), _FEDSOL),  # FedSOL's code
    ("pathmnist", (0.5,), (0.5,), _FEDSOL),  # FedSOL's code, for all channels
    ("tissuemnist", (0.5,), (0.5,), _FEDSOL),  # FedSOL's code
):
    benchmarks.register(_name)(_whole(_name, _mean, _std, _source))
