"""`repr` of public objects: a line that says what the object is, without its tensors."""

import dataclasses
from dataclasses import dataclass, replace

import pytest
import torch

import cfl
from cfl import plugins
from cfl.contract import Share
from cfl.streams.datasets import digits
from tests import toy

MOST = 200  # characters of a line


@pytest.fixture(scope="module")
def met(tmp_path_factory):
    """Objects that a user meets, by name."""
    found, folder = {}, tmp_path_factory.mktemp("run")

    class Watching(cfl.Strategy):
        def plan(self, task, tasks, rounds):
            return [cfl.Phase("train", rounds), cfl.Phase("look", train=False, work=True)]

        def loss(self, logits, ctx):
            found.update(ctx=ctx, batch=ctx.batch)
            return super().loss(logits, ctx)

        def work(self, params, client, shared, state, info):
            found.update(client=client, info=info, phase=info.phase, share=client.shares[info.task])
            return {}, state

    stream = toy.stream()
    result = cfl.run(toy.config("rounds=1"), stream=stream, strategy=Watching(), output=folder)
    task = stream.tasks[0]
    found.update(stream=stream, task=task, samples=task.train, pool=task.train.pool, model=result.model)
    found.update(config=toy.config(), saved=cfl.load(folder, strategy=Watching()), registry=plugins.strategies)
    found.update(arrays=digits(), benchmark=plugins.benchmarks.get("iris"))
    return found


def test_no_representation_shows_tensors(met):
    names = "arrays batch benchmark client config ctx info model phase pool registry samples saved share stream task"
    assert sorted(met) == names.split()
    for name, item in met.items():
        text = repr(item)
        assert "tensor(" not in text and "\n" not in text and len(text) <= MOST, name
        assert text.lstrip("<").split(".")[-1].startswith(type(item).__name__) or type(item).__name__ in text, name


def test_what_representations_say(met):
    stream = met["stream"]
    train, test = (sum(len(getattr(task, which)) for task in stream.tasks) for which in ("train", "test"))
    assert repr(stream) == (
        f"Stream('toy', tasks=3, scenario='domain', input_shape=({toy.DIMENSIONS},), "
        f"{train} train and {test} test, {len(stream.public)} public samples)"
    )
    assert str(met["config"]) == repr(met["config"]) and "fot, seed 0" in repr(met["config"])
    assert "3 tasks trained, ACC " in repr(met["saved"])
    assert repr(replace(met["saved"], metrics={**met["saved"].metrics, "acc": None})).endswith(
        "ACC – %)"
    )  # a stopped run
    assert repr(Share(stream.tasks[0].train, torch.arange(3))) == f"Share(3 of {len(stream.tasks[0].train)} samples)"


def test_a_method_shows_the_options_that_differ_from_their_defaults():
    fot = plugins.strategies.get("fot")
    assert repr(fot()) == "FOT()"
    assert repr(fot(threshold=0.95, sketch="gram")) == "FOT(threshold=0.95, sketch='gram')"

    @dataclass(frozen=True)
    class Own(fot):
        strength: float = cfl.option(1.0, "of a term")
        table: object = dataclasses.field(default=None, repr=False)

    assert (
        repr(Own(strength=2.0, threshold=0.5, table=torch.zeros(9))) == f"{Own.__name__}(threshold=0.5, strength=2.0)"
    )

    @dataclass(frozen=True)
    class Named(fot):
        def __repr__(self):
            return "as its author wants it"

    @dataclass(frozen=True)
    class Heir(Named):
        pass

    assert repr(Named()) == repr(Heir()) == "as its author wants it"
