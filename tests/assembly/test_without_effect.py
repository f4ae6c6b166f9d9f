"""Notes on options that another option leaves without effect."""

import pytest

import cfl
from cfl.assembly import without_effect
from cfl.config import presets
from cfl.core import plugins
from tests import toy


@pytest.mark.parametrize(
    ("option", "state", "on"),
    [
        ("dp.clip=0.5", "without dp.level", ["dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson"]),
        ("secure.quorum=0.9", "without secagg", ["secagg=sum"]),
        ("model.adapter_rank=2", "without model.adapter", ["model.adapter=lora"]),
        ("attack.clients=2", "without attack.name", ["attack.name=scale"]),
        ("partition.alpha=0.1", "with partition.name=iid", ["partition.name=dirichlet"]),
        ("partition.shards=3", "with partition.name=iid", ["partition.name=shards"]),
        ("partition.min_samples=3", "with partition.name=iid", ["partition.name=lda"]),
        ("local.momentum=0.9", "with local.optimizer=adam", ["local.optimizer=sgd"]),
        ("local.lr_restart=false", "with local.lr_decay=1.0", ["local.lr_decay=0.5"]),
        ("public.samples=9", "without public.name", ["public.name=mnist"]),
        ("class_loss=current", "with scenario=domain", ["scenario=class"]),
        ("block=4", "with engine=loop", ["engine=pool"]),
        ("workers=2", "with engine=vmapped", ["engine=pool+vmapped"]),
    ],
)
def test_an_option_is_named_only_while_its_switch_is_off(option, state, on):
    off = [state.removeprefix("with ")] if state.startswith("with ") else []
    config = cfl.resolve("own-stream", overrides=[*off, option])
    assert without_effect.notes(config, "domain") == [f"{option} has no effect {state}"]
    assert without_effect.notes(cfl.resolve("own-stream", overrides=[option, *on]), "class") == []


def test_the_default_written_out_is_not_named():
    assert (
        without_effect.notes(cfl.resolve("own-stream", overrides=["dp.clip=1.0", "partition.alpha=0.5"]), "task") == []
    )


@pytest.mark.parametrize("benchmark", [name for name in plugins.benchmarks.names() if presets.preset(name)])
def test_presets_bring_no_notes(benchmark):
    for scale in ("paper", *presets.preset(benchmark).get("variants", {}).get("scale", {})):
        config = cfl.resolve(benchmark, scale=scale)
        assert without_effect.notes(config, "task") == []


def test_what_a_preset_sets_is_not_named_where_its_switch_is_turned_off(monkeypatch):
    own = {
        "partition": {"name": "dirichlet", "alpha": 0.1},
        "variants": {"scale": {"small": {"attack": {"clients": 3}}}},
    }
    for module in (presets, without_effect):
        monkeypatch.setattr(module, "preset", lambda name: own)
    monkeypatch.setattr("cfl.assembly.resolve.preset", lambda name: own)
    quiet = cfl.resolve("own-stream", overrides=["partition.name=iid"], scale="small")
    assert (quiet.partition.alpha, quiet.attack.clients) == (0.1, 3)
    assert without_effect.notes(quiet, "task") == []
    changed = cfl.resolve("own-stream", overrides=["partition.name=iid", "partition.alpha=0.2"], scale="small")
    assert without_effect.notes(changed, "task") == ["partition.alpha=0.2 has no effect with partition.name=iid"]


def test_a_run_begins_with_the_notes():
    shown = []

    class Notes(cfl.sinks.NullSink):
        def start(self, config, notes, total_rounds):
            shown.extend(notes)

    cfl.run(toy.config("dp.clip=0.5", "rounds=1", method="fedavg"), stream=toy.stream(), sink=Notes())
    assert "dp.clip=0.5 has no effect without dp.level" in shown
