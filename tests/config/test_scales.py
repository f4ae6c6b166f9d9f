"""Every preset has a scale of minutes and a scale of seconds; smoke runs go from start to end."""

from pathlib import Path

import pytest

import cfl
from cfl.assembly.methods import build
from cfl.config.presets import preset
from cfl.core import plugins
from cfl.core.plugins import DEFAULT_METHOD
from cfl.experiments.reproduce import tables
from tests import toy
from tests.toy import need_data

BENCHMARKS = [name for name in plugins.benchmarks.names() if preset(name)]
SCALES = ("small", "smoke")
WITHOUT_FILES = ("permuted-digits", "split-digits", "iris", "split-topics")


def visits(config: cfl.RunConfig) -> float:
    """Passes over the data of the longest task, averaged over the clients."""
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


@pytest.mark.parametrize("scale", ["paper", *SCALES])
@pytest.mark.parametrize("benchmark", [name for name in BENCHMARKS if "fedproj" in methods(name)])
def test_what_distils_does_so_alike(benchmark: str, scale: str) -> None:
    alike = ("server_epochs", "server_batch", "server_lr")
    found = [
        vars(build(cfl.resolve(benchmark, method=name, scale=scale))[name]) for name in ("fedproj", "feddf", "fedet")
    ]
    assert len({tuple(options[name] for name in alike) for options in found}) == 1


@pytest.mark.parametrize("scale", ["paper", *SCALES])
def test_fedprojs_tables_compare_like_with_like(scale: str, tmp_path: Path) -> None:
    """FedProx has one mu in all columns; FedProj has the alpha whose cell of Table 3 b is that of Table 1."""
    printed: dict[str, dict[float, float]] = {}
    ablation = tables()["fedproj-table3b"].runs((), [0], scale, (), tmp_path)
    for cell, (run,) in ablation.items():
        alpha = build(run.config)["fedproj"].alpha
        printed.setdefault(cell.column, {})[cell.paper["acc"].mean] = alpha
    mus = set()
    for cell, (run,) in tables()["fedproj-table1"].runs((), [0], scale, (), tmp_path).items():
        rules = build(run.config)
        if cell.row == "FedProx":
            mus.add(rules["fedprox"].mu)
        if cell.row == "FedProj":
            assert rules["fedproj"].alpha == printed[cell.column][cell.paper["acc"].mean]
    assert len(mus) == 1


@pytest.mark.parametrize("benchmark", toy.quick("permuted-digits", of=WITHOUT_FILES))
def test_smoke_runs_end(benchmark: str) -> None:
    for method in methods(benchmark)[:2]:
        config, metrics = run(benchmark, method)
        assert 0 <= metrics["acc"] <= 1 and len(metrics["accuracy_matrix"]) == (config.tasks or 1)


@pytest.mark.slow
@pytest.mark.data
@pytest.mark.parametrize(
    "benchmark, method, data",
    [
        pytest.param("permuted-mnist", "fot", ["mnist"], marks=pytest.mark.slow),
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
