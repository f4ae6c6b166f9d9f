"""`benchmarks/auto_choice.py`: choices beside a busy process, and how close they are to the fastest engine."""

import pytest

from cfl.core import plugins


@pytest.fixture
def scripts(script, monkeypatch):
    for registry in (plugins.benchmarks, plugins.models):  # forget afterwards what the scripts register
        monkeypatch.setattr(registry, "_items", dict(registry._items))
    return script("auto_choice"), script("throughput_work")


@pytest.mark.slow
def test_choices_are_compared_with_the_fastest(scripts, monkeypatch):
    auto_choice, work = scripts
    monkeypatch.setattr(auto_choice, "engines", lambda clients: [("loop", None), ("vmapped", 2)])
    small = dict(name="tiny", clients=3, samples=20, batch=20, shape=(8,), classes=3, model="mlp", lr=0.1)
    row = auto_choice.measure(work.Workload(**small, options={"hidden": [16]}), tries=2, runs=3)
    assert len(row["choices"]) == len(row["ratios"]) == 2
    assert {*row["choices"], "loop, threads 1", "vmapped, block 2, threads 1"} == {*row["seconds"]}
    median = {name: sorted(each)[1] for name, each in row["seconds"].items()}
    assert median[row["best"]] == min(median.values())
    assert row["ratios"] == [median[name] / min(median.values()) for name in row["choices"]]
    assert row["good"] == sum(ratio <= 1.05 for ratio in row["ratios"])


@pytest.mark.parametrize(("clients", "blocks"), [(10, [2, 4, 8, 10]), (8, [2, 4, 8]), (64, [2, 4, 8])])
def test_a_choice_is_compared_with_all_clients_in_one_block_if_they_are_few(scripts, clients, blocks):
    engines = scripts[0].engines(clients)
    assert [block for name, block in engines if name == "pool+vmapped"] == blocks
    assert [name for name, block in engines if block is None] == ["loop", "pool"]


def test_the_busy_process_ends_with_the_measurement(scripts):
    auto_choice, _ = scripts
    with auto_choice.busy() as process:
        assert process.poll() is None
    assert process.poll() is not None
