"""`benchmarks/collect.py`: what is stored of a run, and the page that is made from stored runs alone."""

import json
from pathlib import Path

import pytest

import cfl
from cfl.assembly.resolve import dump
from cfl.core.metrics import percent

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def collect(script):
    return script("collect")


@pytest.mark.slow
def test_the_page_is_the_one_of_the_stored_runs(collect):
    assert collect.PAGE.read_text(encoding="utf-8") == collect.page(), "run python benchmarks/collect.py"


def put(run, config):
    """A finished run of FOT on Permuted MNIST whose numbers are not computed but put there."""
    matrix = [[0.9, *[None] * 9], *([0.9] * (task + 1) + [None] * (9 - task) for task in range(1, 10))]
    run.mkdir()
    (run / "config.yaml").write_text(json.dumps(dump(config)))  # JSON is YAML
    figures = {"method": "fot", "benchmark": "permuted-mnist", "seed": config.seed, "acc": 0.9, "fgt": 0.0175}
    figures |= {"accuracy_matrix": matrix, "subspace_use": {"a": 0.5, "b": 0.75}}
    (run / "metrics.json").write_text(json.dumps(figures))
    (run / "timing.json").write_text(json.dumps({"clients": {"train": 1.0}, "server": {}, "measurement": {}}))


def test_a_run_is_stored_once_and_shown(collect, tmp_path):
    few = ["tasks=2", "rounds=1", "model.hidden=[8]", "partition.clients=4"]
    own = cfl.run(cfl.resolve("permuted-digits", method="fot", overrides=few), output=tmp_path / "own").metrics
    for _ in range(2):
        collect.store(tmp_path / "own", tmp_path / "runs")
        (kept,) = (tmp_path / "runs" / "paper" / "permuted-digits").iterdir()
        (kept / "machine.json").unlink()  # as a kill before the end leaves it
    kept = kept.rename(kept.with_name("fot-of-an-earlier-version"))  # whose options give another hash
    for _ in range(2):
        collect.store(tmp_path / "own", tmp_path / "runs")
    assert [kept] == list(kept.parent.iterdir())
    assert {path.name for path in kept.iterdir()} == {"config.yaml", "metrics.json", "timing.json", "machine.json"}
    machine = json.loads((kept / "machine.json").read_text())
    page = collect.page(tmp_path / "runs")
    assert f"{machine['processor']}, {machine['cores']} cores" in page and "runs: 1," in page
    (row,) = (line for line in page.splitlines() if line.startswith("| `fot`"))
    options = "`tasks=2`, `rounds=1`, `partition.clients=4`, `model.hidden=[8]`"  # what differs from the preset
    assert f" {percent(own['acc'])} |" in row
    assert f"## permuted-digits, not in a paper (full length)\n\nWith {options}:" in page


def test_a_title_has_what_all_groups_set_and_the_setting_does_not_say(collect):
    first = "cfl-run train x --method fot --set engine=pool --set partition.name=shards --set a.b=1 --set c=2".split()
    second = "cfl-run train x --method ewc --set engine=pool --set a.b=1 --set partition.name=shards --set c=3".split()
    assert collect._shared([first, second], []) == ["partition.name=shards", "a.b=1"]
    assert collect._shared([first, second], ["a.b=1"]) == ["partition.name=shards"]
    assert collect._shared([first, []], "") == []  # no command is known of the second
    # a setting writes equal entries of a list once, as labels do
    assert collect._shared([["--set", "rounds=[2,1,1,1]"]], ["rounds=[2,3 x 1]"]) == []


def test_a_label_is_of_what_differs_between_the_rows(collect, tmp_path):
    """Two runs with dropout, which the preset has not, one of them with another rank rule: numbers are put there."""
    for place, rule in enumerate(([], ["strategy.criterion=norm_ratio"])):
        options = ["partition.name=shards", "strategy.dropout=true", *rule]
        config = cfl.resolve("permuted-mnist", method="fot", overrides=options, seed=0)
        put(tmp_path / str(place), config)
        collect.store(tmp_path / str(place), tmp_path / "runs")
    page = collect.page(tmp_path / "runs")
    title = "not in a paper (full length)\n\nWith `partition.name=shards`, `strategy.dropout=true`:\n"
    labels = [line.split(" | ")[0] for line in page.partition(title)[2].splitlines() if line.startswith("| `")]
    assert sorted(labels) == ["| `fot (strategy.criterion=norm_ratio)`", "| `fot`"]


def test_a_run_of_a_paper_s_table_stands_beside_the_paper(collect, tmp_path):
    """A stored run of a cell."""
    put(tmp_path / "run", cfl.resolve("permuted-mnist", method="fot", overrides=["partition.name=iid"], seed=4))
    collect.store(tmp_path / "run", tmp_path / "runs")
    page = collect.page(tmp_path / "runs")
    (row,) = (line for line in page.splitlines() if line.startswith("| FOT |"))
    # FOT, Table 1: 90.35 ± 0.06 and 1.75 ± 0.06
    assert row == "| FOT | 90.35 ± 0.06 | 90.00 | -0.35 | 1.75 ± 0.06 | 1.75 | +0.00 | 1 |"
    assert "| PMNIST | 62.18 | 62.50 | +0.32 | 1 |" in page  # Table 3; (50 + 75) / 2
    assert "FOT, Table 1: PMNIST, non-IID" not in page and "not in a paper" not in page


def test_a_run_in_bfloat16_is_in_a_table_of_its_own(collect, tmp_path):
    """Two runs that differ in the precision alone: numbers are put there."""
    for place, options in enumerate(([], ["precision=bf16"])):
        config = cfl.resolve("permuted-mnist", method="fot", overrides=options, seed=0)
        put(tmp_path / str(place), config)
        collect.store(tmp_path / str(place), tmp_path / "runs")
    page = collect.page(tmp_path / "runs")
    assert "not in a paper" not in page
    for words, rows in (("", {"FL", "FOT"}), (", `precision=bf16`", {"FOT"})):
        section = page.partition(f"## FOT, Table 1 (full length{words})\n")[2].partition("\n## ")[0]
        assert ("--set precision=bf16" in section) == bool(words)
        found = {line.split(" | ")[0].removeprefix("| "): line for line in section.splitlines() if line[:2] == "| "}
        assert rows <= {*found} and ("FL" in found) == ("FL" in rows) and "90.00" in found["FOT"]
