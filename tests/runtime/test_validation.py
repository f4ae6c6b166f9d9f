"""Runs that hold training samples out: nobody sees them, and the same predictor is evaluated on them."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import cfl
from cfl.assembly import methods
from cfl.assembly.resolve import dump, load
from cfl.config.overrides import read_yaml
from cfl.core import ConfigError
from cfl.experiments.compare import HOW, digest, experiment
from cfl.flower.apps import hash_of
from cfl.runtime import checkpoint
from cfl.runtime.builder import build_session
from cfl.runtime.fingerprint import decisive
from cfl.streams import held_out
from tests import toy
from tests.runtime.test_resume import finished, killed

HELD = "validation=0.25"  # of 48 samples in two classes: 6 of each


def run(*options, method="fot", multi_head=False, **more):
    return cfl.run(toy.config(*options, method=method), stream=toy.stream(multi_head=multi_head), **more)


@cache
def reference():
    return run(HELD)


def same(ours, theirs):
    return all(leaf.equal(theirs.params[name]) for name, leaf in ours.params.items())


PRIVATE = (
    "partition.name=shards",
    "dp.level=example",
    "dp.noise_multiplier=1",
    "agg.weights=uniform",
    "dp.accountant=rdp",
)
CASES = (
    *(("fot", ()), ("er", ()), ("joint", ()), ("feddf", ("public.name=stream",)), ("fedprotip", ("scenario=class",))),
    ("fedavg", PRIVATE),
)


@pytest.mark.parametrize(("method", "options"), toy.quick(CASES[-1], of=CASES))
def test_a_run_is_that_on_the_remaining_samples_and_also_scores_the_others(method, options):
    """By two runs that hold nothing out: one on the remaining samples, one that has the others as test samples."""
    found = run(HELD, *options, method=method, multi_head=True)
    rest, held = held_out(toy.stream(multi_head=True), 0.25, seed=0)
    config = toy.config(*options, method=method)
    swapped = [replace(task, test=part) for task, part in zip(rest.tasks, held, strict=True)]
    without, scored = (cfl.run(config, stream=each) for each in (rest, replace(rest, tasks=tuple(swapped))))
    assert same(found, without) and same(found, scored)
    assert found.metrics["accuracy_matrix"] == without.metrics["accuracy_matrix"]
    assert found.metrics["validation_matrix"] == scored.metrics["accuracy_matrix"]
    assert found.metrics["validation_acc"] == scored.metrics["acc"] == np.mean(scored.accuracy_matrix[-1])
    assert found.metrics.get("epsilon") == without.metrics.get("epsilon")  # of samples: by the size of a client
    assert found.metrics["client_bytes"] == without.metrics["client_bytes"]
    assert not {"validation_acc", "validation_matrix"} & without.metrics.keys()


@pytest.mark.parametrize(
    "engine", ["engine=vmapped", "engine=pool", "engine=flower"], ids=lambda text: text.partition("=")[2]
)
def test_every_engine_holds_out_the_same(engine):
    found = run(HELD, engine, "block=2", "workers=2", "flower.address=in-process")
    ours, theirs = (
        np.array(result.metrics["validation_matrix"], dtype=float) for result in (found, reference())
    )  # 12 samples: rounding moves at most one across a border
    assert np.allclose(ours, theirs, equal_nan=True, atol=1 / 12 + 1e-9)


def test_a_killed_run_keeps_its_validation_matrix(tmp_path, monkeypatch):
    run(HELD, output=tmp_path / "whole")
    with killed(monkeypatch, at=6, when="after"):  # within the second task
        run(HELD, output=tmp_path / "killed")
    run(HELD, output=tmp_path / "killed", resume=True)
    assert finished(tmp_path / "killed") == finished(tmp_path / "whole")


def test_a_loaded_run_is_evaluated_on_test_samples(tmp_path):
    found = run(HELD, output=tmp_path / "run")
    assert cfl.load(tmp_path / "run").accuracies(toy.stream()) == found.metrics["accuracy_matrix"][-1]


def test_a_client_without_a_batch_is_an_error_that_names_task_and_option():
    """0.75 leaves 12 of 48 samples, 3 for each of 4 clients."""
    message = (
        r"the 3 samples that a client has of task 0; .* \(validation=0.75 leaves 12 training samples of the task\)"
    )
    with pytest.raises(ConfigError, match=message):
        run("validation=0.75")
    few = "12 samples cannot be dealt to 13 owners; .*validation=0.75"
    with pytest.raises(cfl.errors.DataError, match=f"task 0: {few}"):
        run("validation=0.75", "partition.clients=13", "local.batch_size=1")


@pytest.mark.parametrize("value", ["1", "-0.1", "true", "a"])
def test_the_share_is_less_than_one(value):
    with pytest.raises(ConfigError, match=r"validation must be a number in \[0, 1\), not"):
        toy.config(f"validation={value}")


def test_a_run_without_held_out_samples_has_the_hashes_and_files_of_earlier_versions(tmp_path):
    config = toy.config()
    earlier = {name: value for name, value in dump(config).items() if name != "validation"}
    assert load(earlier) == config
    assert (
        experiment(config)
        == checkpoint.fingerprint({k: v for k, v in earlier.items() if k not in {*HOW, "text", "attack"}})[:10]
    )
    assert decisive(dump(config)) == decisive(earlier)
    for hashed in (experiment, digest, hash_of):
        assert hashed(config) != hashed(toy.config("validation=0.2")) != hashed(toy.config("validation=0.3"))
    run("validation=0", output=tmp_path)
    assert set(read_yaml(tmp_path / "config.yaml")) == {*earlier, "validation"}
    trees, _ = checkpoint.load_latest(tmp_path / "checkpoints", None, pytest.fail)
    assert list(trees["run"]) == ["acc"]


def test_the_seed_of_the_run_draws_what_is_held_out():
    rows = []
    for seed in (0, 1):
        config = toy.config("tasks=1", "validation=0.25", f"seed={seed}", method="fedavg")
        rows.append(build_session(config, toy.stream(1), methods.build(config)).validation[0].index.tolist())
    assert rows[0] != rows[1]
