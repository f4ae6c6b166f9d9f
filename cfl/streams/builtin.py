"""The built-in benchmarks, registered when this module is imported."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from torch.nn import functional

from cfl.core import DataError
from cfl.core.plugins import benchmarks
from cfl.streams.benchmark import Benchmark, check_count
from cfl.streams.datasets import Arrays, classes, digits, iris, load, pooled
from cfl.streams.store import Pool, Stream, unlabelled
from cfl.streams.tasks import joined, permuted, split, whole

_FOT = "FOT (Bakman et al., ICLR 2024), section 5 and appendix F"
_FASHION_SOURCE = "none; Split MNIST (Zenke et al., ICML 2017) on the images of Fashion-MNIST"
_TINY = "none; the setting of FOT's Mini-ImageNet"
_DIGITS = "scikit-learn, load_digits (no paper)"
_FEDSOL = "FedSOL (Lee et al., CVPR 2024), Table 2"
_FEDPROJ = "FedProj (2025), Table 1"
_PILOT = "FedProj (2025), section 3, pilot study"
_MOST = 1000  # tasks of a permuted stream, each of which keeps its permutation

# (data_root, download) -> a data set and its pool
Read = Callable[[Path | None, bool], tuple[Arrays, Pool]]
Channels = tuple[float, ...]  # one number for each channel, or one for all, in units of the image scaled to [0, 1]


def _digits(data_root: Path | None, download: bool) -> tuple[Arrays, Pool]:
    arrays = digits()
    return arrays, pooled(arrays)


def _data_set(name: str, mean: Channels, std: Channels, complete: bool = False) -> Read:
    """A reader of a data set; with `complete` it raises DataError unless every class has a train image."""

    def read(data_root: Path | None, download: bool) -> tuple[Arrays, Pool]:
        arrays = load(name, data_root, download)
        found = len(arrays.y_train.unique())
        if complete and found != classes(name):
            raise DataError(f"data set '{name}' has train images of {found} classes, not {classes(name)}; replace it")
        return arrays, pooled(arrays, mean, std)

    return read


def _one_task(name: str, arrays: Arrays, pool: Pool, heads: int, tasks: int | None) -> Stream:
    check_count(name, tasks, 1)
    return whole(name, arrays, pool, classes=heads)


def _whole(name: str, mean: Channels, std: Channels, source: str) -> None:
    """Register a data set as a benchmark of one task."""

    def build(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
        arrays, pool = _data_set(name, mean, std)(data_root, download)
        return _one_task(name, arrays, pool, classes(name), tasks)

    benchmarks.register(name)(Benchmark(build, f"{name} as one task of {classes(name)} classes", source))


def _permuted(name: str, default: int, read: Read, summary: str, source: str) -> None:
    """Register a benchmark of a data set with permuted pixels; default: number of tasks."""

    def build(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
        arrays, pool = read(data_root, download)
        count = default if tasks is None else tasks
        check_count(name, count, _MOST)
        return permuted(name, arrays, count, seed=seed, pool=pool)

    benchmarks.register(name)(Benchmark(build, summary, source))


def _split(name: str, groups: int, read: Read, summary: str, source: str) -> None:
    """Register a benchmark of a data set with its classes in equal groups; groups: number of tasks."""

    def build(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
        arrays, pool = read(data_root, download)
        check_count(name, tasks, groups)
        return split(name, arrays, groups, seed=seed, class_order=class_order, pool=pool, keep=tasks)

    benchmarks.register(name)(Benchmark(build, summary, source))


def _iris(tasks: int | None, seed: int, data_root: Path | None, download: bool, class_order: str) -> Stream:
    arrays = iris()
    stream = _one_task("iris", arrays, pooled(arrays), 3, tasks)
    return replace(stream, public=unlabelled(Pool(arrays.x_train)))


def _five(
    tasks: int | tuple[str, ...] | None, seed: int, data_root: Path | None, download: bool, class_order: str
) -> Stream:
    names = tasks if isinstance(tasks, tuple) else tuple(_FIVE)[:tasks]
    if isinstance(tasks, int):
        check_count("five-datasets", tasks, len(_FIVE))
    sets, missing = {}, {}
    for name in names:
        try:
            arrays, pool = _data_set(name, *_FIVE[name])(data_root, download)
            sets[name] = arrays, _coloured(name, pool)
        except DataError as error:
            missing[name] = error
    if missing:
        rest = f"; or leave out {' and '.join(missing)}: --set tasks=[{','.join(sets)}]" if sets else ""
        raise DataError(f"{next(iter(missing.values()))}{rest}")
    return joined("five-datasets", sets, classes=10)


def _coloured(name: str, pool: Pool) -> Pool:
    """Make images 3 x 32 x 32: pad smaller ones with black, repeat the grey channel (a view, without a copy)."""
    height, width = pool.images.shape[2:]
    if max(height, width) > 32:
        raise DataError(
            f"images of data set '{name}' are {height} x {width}, larger than the 32 x 32 of 'five-datasets'; "
            "resize them"
        )
    sides = [(32 - side) // 2 for side in (height, width)]
    padded = functional.pad(pool.images, (sides[1], sides[1], sides[0], sides[0]))
    return replace(pool, images=padded.expand(-1, 3, -1, -1))


# Mean and standard deviation; those of MNIST and Fashion-MNIST are of the padded images.
_FIVE: dict[str, tuple[Channels, Channels]] = {
    "cifar10": ((125.3 / 255, 123.0 / 255, 113.9 / 255), (63.0 / 255, 62.1 / 255, 66.7 / 255)),
    "mnist": ((0.1,), (0.2752,)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197)),
    "fashion-mnist": ((0.2190,), (0.3318,)),
    "notmnist": ((0.4254,), (0.4501,)),  # of images resized to 32 x 32, as in the codes of HAT and GPM
}
_MNIST = _data_set("mnist", (0.1307,), (0.3081,))
_FASHION = _data_set("fashion-mnist", (0.2860,), (0.3530,), complete=True)
_CIFAR100 = _data_set("cifar100", (0.4914, 0.4824, 0.4467), (0.2471, 0.24353, 0.2616), complete=True)
_MINI_IMAGENET = _data_set(
    "mini-imagenet", (0.47313006, 0.44905752, 0.40378186), (0.27292014, 0.26559181, 0.27953038), complete=True
)
_TINY_IMAGENET = _data_set(  # computed from the training images
    "tiny-imagenet100", (0.4743, 0.4473, 0.4061), (0.2797, 0.2703, 0.2847), complete=True
)

_permuted("permuted-digits", 5, _digits, "digits of 8 x 8 pixels, pixels permuted", _DIGITS)
_permuted("permuted-mnist", 10, _MNIST, "MNIST, pixels permuted, one head", _FOT)
_split("split-digits", 5, _digits, "digits of 8 x 8 pixels, two classes a task", _DIGITS)
_split("split-fashion-mnist", 5, _FASHION, "Fashion-MNIST, two classes a task, a head each", _FASHION_SOURCE)
_split("split-cifar100", 10, _CIFAR100, "CIFAR-100, ten classes a task, a head each", _FOT)
_split("split-mini-imagenet", 20, _MINI_IMAGENET, "Mini-ImageNet, five classes a task, a head each", _FOT)
_split(
    "split-tiny-imagenet100", 20, _TINY_IMAGENET, "a hundred classes of Tiny ImageNet, five a task, a head each", _TINY
)
benchmarks.register("iris")(
    Benchmark(_iris, "Iris in two principal components, 150 samples to train and the same to test", _PILOT)
)
benchmarks.register("five-datasets")(
    Benchmark(
        _five, "CIFAR-10, MNIST, SVHN, Fashion-MNIST and notMNIST, a task and a head each", _FOT, names=tuple(_FIVE)
    )
)

for _name, _mean, _std, _source in (
    ("mnist", (0.1307,), (0.3081,), _FEDSOL),  # FedSOL's code
    ("fashion-mnist", (0.2860,), (0.3530,), "Xiao et al., 2017 (no paper of a method)"),  # of the training images
    ("cifar10", (0.4914, 0.48216, 0.44653), (0.24703, 0.24349, 0.26159), _FEDSOL),  # FedSOL's code
    ("cifar100", (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762), _FEDPROJ),  # computed from the training images
    ("svhn", (0.43768, 0.44377, 0.4728), (0.19803, 0.20102, 0.19704), _FEDSOL),  # FedSOL's code
    ("cinic10", (0.47889522, 0.47227842, 0.43047404), (0.24205776, 0.23828046, 0.25874835), _FEDSOL),  # FedSOL's code
    ("pathmnist", (0.5,), (0.5,), _FEDSOL),  # FedSOL's code, for all channels
    ("tissuemnist", (0.5,), (0.5,), _FEDSOL),  # FedSOL's code
):
    _whole(_name, _mean, _std, _source)
