"""Adapters on transformers: methods keep the rules of the kit, projections their guarantee, and privacy its bounds."""

import pytest
import torch
from torch import nn

import cfl
from cfl import models
from cfl.core import tree
from cfl.methods.subspace.layer_inputs import watch
from cfl.testing import check_strategy, toy_config
from tests import toy

ADAPTED = ("model.adapter=lora", "model.adapter_rank=3")
BERT = (
    "model.name=bert_tiny", "model.layers=1", "model.width=12", "model.heads=2", "model.intermediate=16",
    "model.vocabulary=20", "model.dropout=0.0", "model.adapter=lora", "model.adapter_targets=[query,value]",
)  # fmt: skip


def eight_numbers(input_shape, outputs):
    """A vision transformer of one block for the toy stream: its eight numbers are four pixels of two channels."""
    options = {"patch": 1, "width": 6, "heads": 2, "depth": 1}
    return nn.Sequential(nn.Unflatten(1, (2, 2, 2)), models.build("vit_small", (2, 2, 2), outputs, options))


@pytest.fixture
def transformer(monkeypatch):
    """The name of a registered transformer for the toy stream."""
    monkeypatch.setattr(cfl.plugins.models, "_items", dict(cfl.plugins.models._items))
    cfl.plugins.models.register("eight_numbers")(eight_numbers)
    return "eight_numbers"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "rank"), [("gpm", 3), ("fedprotip", 3), ("lorm", 3), ("olora", 6)])
def test_conformance(method, rank, transformer):
    # O-LoRA gives each of the three tasks of the toy stream a third of the rank
    options = (f"model.name={transformer}", "model.adapter=lora", f"model.adapter_rank={rank}")
    check_strategy(cfl.plugins.strategies.get(method)(), config=toy_config(*options))


@pytest.mark.parametrize("method", ["fot", "gpm"])
def test_projected_steps_of_both_factors_keep_the_outputs_of_earlier_texts(method):
    # As for the layers of an MLP: steps orthogonal to x and to A x change neither A x nor B A x, so queries and values
    # of the first task's texts stay, and all other layers are frozen. With at most 16 tokens in 24 dimensions there is
    # room to learn the second task. The large alpha makes up for small initial weights.
    stream, moved, learned = toy.text_stream(train=4, length=4), {}, {}
    old, new = (task.train.gather(torch.arange(4))[0] for task in stream.tasks)
    wide = ("model.width=24", "model.adapter_rank=24", "model.adapter_alpha=192")
    options = (*BERT, *wide, "partition.clients=1", "cohort=1", "local.lr=1.0", "rounds=10")
    for name, own in ((method, {"threshold": 1.0}), ("fedavg", {})):
        rule = toy.recording(cfl.plugins.strategies.get(name))(**own)
        model = cfl.run(toy.config(*options, method=name), stream=stream, strategy=rule).model
        ends = [server["params"] for info, _, server in rule.rounds if info.phase.train and info.round == 9]
        before, after = (model.logits(params, old, 0) for params in ends)
        moved[name] = float((after - before).abs().max())
        before, after = (model.features(params, new, 1) for params in ends)
        learned[name] = float((after - before).abs().max())
    assert moved[method] < 1e-6 < 1e-3 < moved["fedavg"]
    assert min(learned.values()) > 1e-3


def test_statistics_of_adapters_are_those_of_tokens():
    # The inputs of B are A x, which is 0 where x is: padding adds nothing to either Gram matrix.
    config = toy.config(*BERT, "tasks=1", method="fedavg")
    model = cfl.run(config, stream=toy.text_stream(1)).model
    x, seen = toy.texts(6), {}
    with torch.no_grad(), watch(model, model.layers, lambda layer, inputs: seen.update({layer.path: inputs})):
        model.logits(model.params, x, 0)
    adapters = [path for path in seen if path.startswith("encoder")]
    assert {path.rpartition(".")[2] for path in adapters} == {"a", "b"} and len(adapters) == 4
    for path in adapters:
        assert torch.equal(seen[path].ne(0).any(2), x[:, 1] == 1)


def test_gradients_of_single_texts_are_clipped_over_adapters_and_head():
    # Each of at most 6 steps of rate 1 moves the model by at most the clipping norm; the noise is far smaller.
    private = ("dp.level=example", "dp.noise_multiplier=1e-6", "dp.clip=1e-3", "agg.weights=uniform", "local.lr=1")
    config = toy.config(*BERT, *private, "rounds=1", "tasks=1", "local.batch_size=1", method="fedavg")
    result = cfl.run(config, stream=toy.text_stream(1))
    step = tree.sub(result.params, result.model.params)
    assert all(not leaf.any() for name, leaf in step.items() if name in result.model.frozen)
    assert any(leaf.any() for name, leaf in step.items() if ".b.weight" in name)
    assert 0 < float(toy.flat(step).norm()) < 1e-3 * 6 * 1.01


@pytest.mark.parametrize("method", ["fedavg", "fot"])
def test_noise_for_whole_clients_is_that_of_adapters_and_head(method):
    # clip 1e-3 and multiplier 100: the noise of a round's mean is normal with 0.1 / 3 in each number that trains
    private = ("dp.level=client", "dp.noise_multiplier=100", "dp.clip=1e-3", "agg.weights=uniform", "sampling=poisson")
    config = toy.config(*BERT, *private, "rounds=1", "tasks=1", "cohort=4", method=method)
    result = cfl.run(config, stream=toy.text_stream(1))
    step = tree.sub(result.params, result.model.params)
    moving = {name: leaf for name, leaf in step.items() if name not in result.model.frozen}
    assert all(not leaf.any() for name, leaf in step.items() if name in result.model.frozen)
    numbers = toy.flat(moving)
    # of n normal numbers the standard deviation is within 5 / sqrt(2 n) of its mean, as a share of it
    assert float(numbers.std()) == pytest.approx(0.1 / 4, rel=5 / (2 * len(numbers)) ** 0.5)


def test_adapters_with_secure_sums_are_those_without():
    options = (*BERT, "local.lr=0.5")
    plain = cfl.run(toy.config(*options, method="lorm"), stream=toy.text_stream())
    secure = cfl.run(toy.config(*options, "secagg=full", method="lorm"), stream=toy.text_stream())
    assert torch.allclose(toy.flat(plain.params), toy.flat(secure.params), atol=1e-3)
    assert not torch.allclose(toy.flat(plain.params), toy.flat(plain.model.params), atol=1e-2)
