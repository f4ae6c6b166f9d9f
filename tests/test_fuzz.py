"""Random options and damaged files: an error of cfl, or a result, but no other error.

CFL_FUZZ is the number of damaged files, and a fifth of the number of configurations; the default takes seconds.
"""

import os
import shutil
import warnings
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

import cfl
from cfl.config.schema import RunConfig
from cfl.core import CflError
from cfl.report.runs import read
from tests import toy

CASES = int(os.environ.get("CFL_FUZZ", "60"))
# A case that takes ten seconds counts as a hang.
files = settings(max_examples=CASES, deadline=10_000, suppress_health_check=list(HealthCheck), derandomize=True)
configurations = settings(files, max_examples=5 * CASES)
HOW = ("flip", "cut", "add")
FILES = ("metrics.json", "rounds.jsonl", "config.yaml", "model.json", "made_of.json", "checkpoints")


def paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The names of all options, with dots."""
    found = []
    for name, field in model.model_fields.items():
        inner = [kind for kind in (field.annotation, *get_args(field.annotation)) if isinstance(kind, type)]
        sections = [kind for kind in inner if issubclass(kind, BaseModel)]
        found += paths(sections[0], f"{prefix}{name}.") if sections else [prefix + name]
    return found


VALUES = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.sampled_from(["1e999", "[]", "{}", "[1,2]", "{a: 1}", "nan", "-1", "0", "auto", "all"]),
    st.sampled_from(["!!python/object:os.x", "&a", "'"]),
    st.lists(st.integers(-2, 3), max_size=3),
)  # fmt: skip
OPTIONS = st.tuples(st.sampled_from([*paths(RunConfig), "model.hidden", "strategy.threshold", "nothing.here"]), VALUES)


def test_all_sections_have_options() -> None:
    assert {name.partition(".")[0] for name in paths(RunConfig)} == set(RunConfig.model_fields)


@configurations
@given(st.lists(OPTIONS, min_size=1, max_size=3), st.sampled_from(["fot", "fedavg", "ewc", "gpm+fedsol"]))
def test_random_options_resolve_or_are_refused_by_name(options: list[tuple[str, Any]], method: str) -> None:
    try:
        config = cfl.resolve("permuted-digits", method=method, overrides=[f"{name}={value}" for name, value in options])
    except CflError as error:
        assert str(error)
    else:
        assert cfl.resolve(config.benchmark, method=method).model_fields_set  # the next configuration is not affected


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "run"
    cfl.run(toy.config("tasks=2", "rounds=1"), stream=toy.stream(), output=folder, progress=False)
    return folder


@files
@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(1, 255), st.sampled_from(HOW))
def test_damaged_files_of_a_run_are_read_or_refused(
    run: Path, tmp_path_factory: pytest.TempPathFactory, name: str, place: float, change: int, how: str
) -> None:
    folder = tmp_path_factory.mktemp("damaged") / "run"
    shutil.copytree(run, folder)
    path = max((folder / name).iterdir()) if name == "checkpoints" else folder / name
    data = bytearray(path.read_bytes())
    at = int(place * len(data))
    if how == "flip":
        data[at] ^= change
    elif how == "cut":
        del data[at:]
    else:
        data[at:at] = bytes([change]) * 3
    path.write_bytes(data)
    outside = {each: each.stat().st_mtime_ns for each in folder.parent.iterdir() if each != folder}
    for use in (_load, _report, _resume):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                use(folder)
            except CflError as error:
                assert str(error)
    assert {each: each.stat().st_mtime_ns for each in folder.parent.iterdir() if each != folder} == outside
    shutil.rmtree(folder.parent)


def _load(folder: Path) -> None:
    cfl.load(folder)


def _report(folder: Path) -> None:
    read([folder])


def _resume(folder: Path) -> None:
    config = toy.config("tasks=2", "rounds=1")
    cfl.run(config, stream=toy.stream(), output=folder, resume=True, progress=False)
