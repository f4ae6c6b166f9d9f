"""Every preset has a scale of minutes and one of seconds, and the latter goes through everything."""

import pytest

import cfl
from cfl import plugins
from cfl.config import preset
from cfl.members import DEFAULT_METHOD
from tests.toy import need_data

BENCHMARKS = [name for name in plugins.benchmarks.names() if preset(name)]
SCALES = ("small", "smoke")
WITHOUT_FILES = ("permuted-digits", "split-digits", "iris")


def visits(config: cfl.RunConfig) -> float:
    """Passes over the data of the longest task, in the mean over the clients."""
    each = config.rounds
    rounds = each if isinstance(each, int) else max(each.values() if isinstance(each, dict) else each)
    return rounds * config.local.epochs * config.cohort / config.partition.clients


def methods(benchmark: str) -> list[str]:
    return [DEFAULT_METHOD, *preset(benchmark).get("methods", {})]


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_every_preset_has_both_scales_for_each_method_it_names(benchmark: str) -> None:
    assert set(preset(benchmark)["variants"]["scale"]) == set(SCALES)
    for method in methods(benchmark):
        paper, small, smoke = (cfl.resolve(benchmark, method=method, scale=name) for name in ("paper", *SCALES))
        assert (paper.scale, small.scale, smoke.scale) == ("paper", *SCALES)
        assert visits(paper) >= visits(small) > visits(smoke)


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_smoke_is_two_tasks_of_two_rounds_at_most(benchmark: str) -> None:
    smoke = cfl.resolve(benchmark, scale="smoke")
    tasks = len(smoke.tasks) if isinstance(smoke.tasks, tuple) else smoke.tasks
    assert smoke.rounds in (1, 2) and tasks in (None, 1, 2)  # null: the benchmark is one task
    assert smoke.cohort * smoke.local.epochs <= 15  # iris has 3 clients of 5 epochs, over 50 samples each


@pytest.mark.parametrize("benchmark", WITHOUT_FILES)
def test_smoke_runs_end(benchmark: str) -> None:
    for method in methods(benchmark)[:2]:
        config, metrics = run(benchmark, method)
        assert 0 <= metrics["acc"] <= 1 and len(metrics["accuracy_matrix"]) == (config.tasks or 1)


@pytest.mark.data
@pytest.mark.parametrize(
    "benchmark, method, data",
    [
        ("permuted-mnist", "fot", ["mnist"]),
        ("mnist", "fedproj", ["mnist", "notmnist"]),  # it distils on the second
        ("split-tiny-imagenet100", "ewc", ["tiny-imagenet100"]),
    ],
)
def test_smoke_runs_of_real_data_end(benchmark: str, method: str, data: list[str]) -> None:
    need_data(*data)
    config, metrics = run(benchmark, method)
    assert 0 <= metrics["acc"] <= 1 and len(metrics["accuracy_matrix"]) == (config.tasks or 1)


def run(benchmark: str, method: str) -> tuple[cfl.RunConfig, dict]:
    config = cfl.resolve(benchmark, method=method, scale="smoke")
    return config, cfl.run(config).metrics
