"""A run whose writes fail: cut off at any write it resumes to the same bytes, and a full disk is an error of cfl."""

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from cfl.core import CflError
from cfl.runtime import checkpoint, tree_file
from cfl.runtime.runner import run
from tests import toy
from tests.runtime.test_resume import OPTIONS, finished

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
SAMPLES = 3  # writes of each kind of fault; benchmarks/soak.py tries all of them


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""


def die() -> None:
    raise Killed


@pytest.fixture(scope="module")
def faults() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPTS))
    try:
        import soak_faults

        yield soak_faults
    finally:
        sys.path.remove(str(SCRIPTS))


def train(folder: Path) -> None:
    config = toy.config(*OPTIONS, "tasks=2")
    run(config, stream=toy.stream(), output=folder, resume=folder.exists(), progress=False)


def trees(folder: Path) -> bytes:
    """All trees of the last checkpoint; its metadata has the seconds of the run."""
    loaded = checkpoint.load_latest(folder / "checkpoints", None, pytest.fail)
    assert loaded is not None
    return bytes(tree_file.encode(loaded[0]))


@pytest.fixture(scope="module")
def calm(faults: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """The writes of a run that nothing disturbs, and its folder."""
    folder = tmp_path_factory.mktemp("calm") / "run"
    with faults.faulty(faults.Writes(folder)) as writes:
        train(folder)
    return writes.made, folder


def test_all_kinds_of_writes_are_seen(calm: tuple[list[str], Path]) -> None:
    assert set(calm[0]) == {"write", "fsync", "replace", "unlink"}
    # Every file that is replaced is written and flushed before, and the folder of a checkpoint after.
    assert calm[0].count("fsync") > calm[0].count("replace") > 0


@pytest.mark.parametrize("kind", ["kill before", "kill after", "torn write", "full disk", "flush fails"])
def test_a_fault_at_a_write_costs_nothing(
    kind: str, faults: ModuleType, calm: tuple[list[str], Path], tmp_path: Path
) -> None:
    made, reference = calm
    places = range(faults.Writes(tmp_path, kind=kind, made=made).met)
    for at in random.Random(kind).sample(places, SAMPLES):
        folder = tmp_path / str(at)
        writes = faults.Writes(folder, at, kind, die)
        with faults.faulty(writes):
            try:
                train(folder)
            except (CflError, Killed) as end:
                assert isinstance(end, Killed) == (kind in faults.CUTS)
        assert writes.met > at
        train(folder)
        assert finished(folder) == finished(reference)
        assert trees(folder) == trees(reference)
