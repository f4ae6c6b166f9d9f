"""LoRA adapters: their products by hand and against dense layers, what trains and travels, and runs that have them."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import cfl
from cfl import models
from cfl.core import ConfigError, rng, tree
from cfl.models import Model, adapters
from cfl.models.adapters import Lora, adapted
from cfl.runtime.fingerprint import decisive
from cfl.testing import check_strategy, toy_config
from tests import toy

STREAM = toy.stream(3, multi_head=True)
ADAPTED = ("model.adapter=lora", "model.adapter_rank=3")


def handle(module, shape, *, classes=(2,), **options):
    """The handle on a module with adapters."""
    return Model(adapted(module, shape, Lora(**options), seed=0), shape, classes, multi_head=False)


def drawn(params):
    """The tree with other values for all leaves of adapters."""
    return {
        name: toy.random(*leaf.shape, seed=place).to(leaf) if name.split(".")[-2] in ("a", "b") else leaf
        for place, (name, leaf) in enumerate(params.items())
    }


def conv_net():
    """Convolutions with stride, groups, dilation and reflected borders, normalisation, and a head."""
    with rng.fork(3):
        return nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.GroupNorm(2, 4),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, groups=2, padding=2, dilation=2, padding_mode="reflect"),
            nn.Flatten(2),
            nn.Conv1d(6, 4, 3, stride=2, padding=1, groups=2),
            nn.Flatten(),
            nn.Linear(4 * 8, 2),
        ).double()


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_an_adapted_layer_by_hand():
    # W = [1 2], A = [3 1], B = [2], alpha 4 and rank 2 would have two rows; with rank 1 the factor is 4:
    # for x = (1, 5): W x = 11, A x = 8, B A x = 16, y = 11 + 4 * 16 = 75; merged: W + 4 B A = [25 10], 25 + 50 = 75.
    layer = adapters.Adapted(nn.Linear(2, 1, bias=False), rank=1, scale=4.0)
    for part, values in ((layer.base, [[1.0, 2]]), (layer.a, [[3.0, 1]]), (layer.b, [[2.0]])):
        part.weight.data = torch.tensor(values)
    assert layer(torch.tensor([[1.0, 5]])).tolist() == [[75]]
    assert layer.merged(layer.base.weight, layer.a.weight, layer.b.weight).tolist() == [[25.0, 10]]
    assert layer.weight.tolist() == [[25.0, 10]]  # what a network sees that multiplies by the weight itself
    assert (layer.in_features, layer.out_features) == (2, 1)


def test_a_transformer_layer_is_evaluated_with_its_adapters():
    """In evaluation, without gradients, torch reads the weights of its transformer layers in place of calling them."""
    with rng.fork(3):
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = handle(nn.Sequential(nn.Linear(5, 8), layer, nn.Flatten(), nn.Linear(24, 2)), (3, 5), rank=2)
    params, x = drawn(model.params), toy.random(4, 3, 5, seed=1).float()
    with model.evaluation():
        seen = model.logits(params, x, 0)
        with torch.no_grad():
            assert torch.allclose(model.logits(params, x, 0), seen, atol=1e-5)
            assert not torch.allclose(model.logits(model.params, x, 0), seen, atol=1e-2)


def test_what_travels_by_hand():
    # 8-6-6-2 with rank 3 beside the hidden layers: A 3 x 8 and B 6 x 3, A 3 x 6 and B 6 x 3, and a head of 14 numbers:
    # 24 + 18 + 18 + 18 + 14 = 92 of 4 bytes, for each of 3 clients in each of 2 rounds of 3 tasks, up and down.
    # The frozen layers, 54 + 42 = 96 numbers, are stored by each client and sent by nobody.
    result = cfl.run(toy.config(*ADAPTED, method="fedavg"), stream=STREAM)
    assert result.metrics["bytes_up"] == result.metrics["bytes_down"] == 92 * 4 * 3 * 2 * 3
    assert result.metrics["client_bytes"] == 96 * 4
    plain = cfl.run(toy.config(method="fedavg"), stream=STREAM).metrics
    assert plain["bytes_up"] == (96 + 14) * 4 * 3 * 2 * 3 and plain["client_bytes"] == 0


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda: toy.mlp(8, 6, 6, 2), conv_net])
def test_at_the_start_the_outputs_are_those_of_the_network_itself(make):
    shape = (8,) if isinstance(make()[0], nn.Linear) else (2, 8, 8)
    x, module = toy.random(5, *shape), make()
    own = handle(module, shape)
    assert torch.equal(own.logits(own.params, x, 0), module(x))
    assert {name for name, leaf in own.params.items() if name.endswith("b.weight") and not leaf.any()}
    assert all(leaf.requires_grad for leaf in module.parameters())  # the given network is as it was


def test_at_full_rank_a_step_is_the_dense_layers():
    # B = 0, A square with A^T A = I, factor 1. With g the gradient by the weight W + B A of the dense layer, a step of
    # SGD moves B by -lr g A^T, and A by -lr B^T g = 0. So W + B A moves by -lr g A^T A = -lr g, as the dense layer's.
    lr, x, y = 0.1, toy.random(7, 5), torch.arange(7) % 2
    module = toy.net(nn.Linear(5, 4, bias=False), nn.ReLU(), nn.Linear(4, 2))
    own = handle(module, (5,), rank=5)
    params = {**own.params, "0.a.weight": torch.linalg.qr(toy.random(5, 5, seed=1))[0]}

    def stepped(model, params, names):
        def loss(leaves):
            return nn.functional.cross_entropy(model.logits({**params, **leaves}, x, 0), y)

        leaves = tree.select(params, names)
        return {**params, **tree.sub(leaves, tree.scale(torch.func.grad(loss)(leaves), lr))}

    after = stepped(own, params, own.trainable(0))
    plain = Model(module, (5,), [2], multi_head=False)
    dense = stepped(plain, plain.params, plain.trainable(0))
    assert torch.equal(after["0.a.weight"], params["0.a.weight"])
    merged = adapters.merged(own.module, after)[1]
    assert merged.keys() == dense.keys()
    assert all(torch.allclose(merged[name], leaf, atol=1e-12) for name, leaf in dense.items())
    assert not torch.allclose(dense["0.weight"], plain.params["0.weight"], atol=1e-3)


def test_merged_weights_give_the_outputs_of_the_adapted_network():
    for module, shape in ((conv_net(), (2, 8, 8)), (toy.mlp(8, 6, 6, 2), (8,))):
        own = handle(module, shape, rank=2, alpha=3.0)
        params, x = drawn(own.params), toy.random(5, *shape)
        plain, leaves = adapters.merged(own.module, params)
        assert leaves.keys() == dict(module.named_parameters()).keys()
        module.load_state_dict(leaves)
        expected = own.logits(params, x, 0)
        assert torch.allclose(module(x), expected, atol=1e-12) and not torch.allclose(plain(x), expected)
        assert [type(part) for part in plain] == [type(part) for part in module]


def test_a_layer_under_two_names_gets_one_adapter():
    module = toy.TwoNames()
    own = handle(module, (4,))
    assert own.trainable(0) == ("first.a.weight", "first.b.weight", "last.weight", "last.bias")
    params, x = drawn(own.params), toy.random(5, 4).float()
    plain, leaves = adapters.merged(own.module, params)
    assert plain.layers[0] is plain.first and leaves.keys() == dict(module.named_parameters()).keys()
    expected = own.logits(params, x, 0)
    module.load_state_dict(leaves, strict=False)  # the other names are of the same tensors
    assert torch.allclose(module(x), expected, atol=1e-6) and not torch.allclose(plain(x), expected, atol=1e-3)


# --- what is adapted -------------------------------------------------------------------------------------------------


def test_only_adapters_and_the_head_train():
    own = handle(conv_net(), (2, 8, 8))
    pairs = [f"{path}.{part}" for path in (0, 3, 5) for part in "ab"]
    assert own.trainable(0) == (*(f"{path}.weight" for path in pairs), "7.weight", "7.bias")
    assert own.stem == "0.a" and {layer.path for layer in own.layers} == {*pairs, "7"}
    assert [layer.groups for layer in own.layers] == [1, 1, *[2] * 8, 1]
    assert own.notes()[-1] == "adapters of low rank beside 0, 3, 5; they and the head train"


def test_frozen_networks_get_adapters_and_a_frozen_head_stays_frozen():
    module = toy.mlp(8, 6, 6, 2).requires_grad_(False)
    assert handle(module, (8,)).trainable(0) == ("0.a.weight", "0.b.weight", "2.a.weight", "2.b.weight")


def test_layers_with_a_forward_of_their_own_get_no_adapter():
    """Of y = 2 W x: the adapted layer would give 2 W x + B A x, but the exported one 2 (W + B A) x."""

    class Doubled(nn.Linear):
        def forward(self, x):
            return nn.functional.linear(x, 2 * self.weight, self.bias)

    def net():
        return toy.net(nn.Linear(8, 6), Doubled(6, 6), nn.Linear(6, 2))

    text = "no adapter fits a layer with a forward of its own: 1"
    with pytest.warns(UserWarning, match=text):
        own = handle(net(), (8,))
    assert own.trainable(0) == ("0.a.weight", "0.b.weight", "2.weight", "2.bias")
    params, x, plain = drawn(own.params), toy.random(5, 8), net()
    plain.load_state_dict(adapters.merged(own.module, params)[1])
    assert torch.allclose(plain(x), own.logits(params, x, 0), atol=1e-12)
    with pytest.raises(ConfigError, match=f"{text}; choose other model.adapter_targets, or set model.adapter=none"):
        handle(net(), (8,), targets=("1",))


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("qkv",), ["blocks.0.qkv", "blocks.1.qkv"]),
        (("blocks.1",), ["blocks.1.qkv", "blocks.1.out", "blocks.1.mlp.0", "blocks.1.mlp.3"]),
        (("patches", "mlp.3"), ["patches", "blocks.0.mlp.3", "blocks.1.mlp.3"]),
    ],
)
def test_targets_are_names_or_parts_of_names(targets, expected):
    module = models.build("vit_small", (3, 8, 8), 2, {"width": 12, "depth": 2})
    own = handle(module, (3, 8, 8), targets=targets)
    assert list(dict.fromkeys(layer.path.rpartition(".")[0] for layer in own.layers[:-1])) == expected


def test_faults_are_named():
    module = models.build("vit_small", (3, 8, 8), 2, {"width": 12, "depth": 1})
    with pytest.raises(ConfigError, match=r"unknown layer in model.adapter_targets: 'qkw'; did you mean '.*qkv'"):
        handle(module, (3, 8, 8), targets=("qkw",))
    with pytest.raises(ConfigError, match=r"unknown layer in model.adapter_targets: 'head'"):
        handle(module, (3, 8, 8), targets=("head",))
    with pytest.raises(ConfigError, match=r"finds no layer for an adapter.*set model.adapter=none"):
        handle(nn.Sequential(nn.Linear(8, 2)), (8,))
    with pytest.raises(ConfigError, match=r"unknown value of model.adapter 'lorra'; did you mean 'lora'"):
        toy.config("model.adapter=lorra")
    with pytest.raises(ConfigError, match=r"model.adapter_rang'; did you mean 'model.adapter_rank'"):
        toy.config("model.adapter_rang=2")
    with pytest.raises(ConfigError, match=r"model.adapter_rank must be a whole number"):
        toy.config("model.adapter_rank=0")


def test_runs_of_versions_without_adapters_can_be_resumed():
    options = {"model": {"name": "mlp", "norm_stats": "batch", "options": {}}}
    now = {"model": {**options["model"], "adapter": "none", "adapter_rank": 8, "adapter_alpha": None}}
    assert decisive(now) == decisive(options)
    assert decisive({"model": {**now["model"], "adapter": "lora"}}) != decisive(options)


# --- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "more"),
    [("fot", ["tasks=2"]), *(pytest.param(name, [], marks=pytest.mark.slow) for name in ("fedavg", "fot"))],
)
def test_conformance(method, more):
    check_strategy(cfl.plugins.strategies.get(method)(), config=toy_config(*ADAPTED, *more))


def test_the_guarantee_of_projections_holds_for_both_factors():
    # Steps of A are orthogonal to old inputs x, so A x does not change for them. The inputs of B are A x, so with steps
    # of B orthogonal to these, B A x does not change either. With all inputs' energy in the bases, and a head for each
    # task, the outputs of the first task stay as they are; with FedAvg they move.
    stream, moved = toy.stream(2, train=4, multi_head=True), {}
    x = stream.tasks[0].train.gather(torch.arange(4))[0]
    options = ("partition.clients=1", "cohort=1", "model.adapter=lora", "local.lr=1.0", "rounds=10")
    for method, own in (("fot", {"threshold": 1.0}), ("fedavg", {})):
        rule = toy.recording(cfl.plugins.strategies.get(method))(**own)
        result = cfl.run(toy.config(*options, method=method), stream=stream, strategy=rule)
        ends = [server["params"] for info, _, server in rule.rounds if info.phase.train and info.round == 9]
        before, after = (result.model.logits(params, x, 0) for params in ends)
        moved[method] = float((after - before).abs().max())
    assert moved["fot"] < 1e-5 < 1e-2 < moved["fedavg"]


@pytest.mark.parametrize(
    "option",
    toy.quick(
        "secagg=full",
        "engine=vmapped",
        of=["precision=bf16", "secagg=full", "engine=vmapped", "engine=pool", "scenario=class"],
    ),
)
def test_frozen_leaves_stay_and_adapters_move(option):
    result = cfl.run(toy.config(*ADAPTED, option, "local.lr=0.2", method="fedavg"), stream=STREAM)
    start = result.model.params
    for name, leaf in result.params.items():
        assert torch.equal(leaf, start[name]) == (name in result.model.frozen), name
    assert len(result.model.frozen) == 4


def test_gradients_of_single_samples_are_those_of_adapters_alone():
    # With clip 1e-3, a sample's gradient has at most this norm, over all leaves that train; 16 samples in steps of lr 1
    # with noise of 1e-9 move the model by at most steps * 1e-3.
    private = ("dp.level=example", "dp.noise_multiplier=1e-6", "dp.clip=1e-3", "agg.weights=uniform", "local.lr=1")
    config = toy.config(*ADAPTED, *private, "rounds=1", "tasks=1", method="fedavg")
    result = cfl.run(config, stream=toy.stream(1))
    step = tree.sub(result.params, result.model.params)
    assert 0 < float(toy.flat(step).norm()) < 1e-3 * 12 * 1.01  # 48 samples of 4 clients: 3 batches of 4


def test_a_finished_run_is_loaded_evaluated_exported_and_resumed(tmp_path):
    config = toy.config("tasks=3", *ADAPTED, "local.lr=0.3", "scenario=class", method="fedavg")
    result = cfl.run(config, stream=STREAM, output=tmp_path / "run")
    run, x = cfl.load(tmp_path / "run"), toy.random(5, toy.DIMENSIONS).float()
    assert run.accuracies(STREAM) == result.accuracy_matrix[-1].tolist()
    network = models.build("mlp", (toy.DIMENSIONS,), 6, run.config.model.options).eval()
    network.load_state_dict(load_file(run.export(tmp_path / "model.safetensors")))
    assert torch.allclose(network(x), run.logits(x), atol=1e-6)
    again = cfl.run(config, stream=STREAM, output=tmp_path / "run", resume=True)
    assert torch.equal(toy.flat(again.params), toy.flat(result.params))


@pytest.mark.slow
def test_a_file_for_other_programs_has_no_adapters(tmp_path):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    reference = pytest.importorskip("onnx.reference", reason="onnx is not installed")
    config = toy.config("tasks=3", *ADAPTED, "local.lr=0.3", "scenario=class", method="fedavg")
    cfl.run(config, stream=STREAM, output=tmp_path / "run")
    run, x = cfl.load(tmp_path / "run"), toy.random(5, toy.DIMENSIONS).float()
    path = run.export(tmp_path / "model.onnx")
    (found,) = reference.ReferenceEvaluator(str(path)).run(["logits"], {"x": x.numpy()})
    assert np.allclose(found, run.logits(x).numpy(), atol=1e-5)


def test_a_network_trained_before_gets_adapters(tmp_path):
    first = cfl.run(toy.config("tasks=3", method="fedavg"), stream=STREAM, output=tmp_path / "first")
    options = ("tasks=3", *ADAPTED, f"start={tmp_path / 'first'}")
    second = cfl.run(toy.config(*options, method="fedavg"), stream=STREAM, output=tmp_path / "second")
    for name in ("1.weight", "1.bias", "3.weight", "3.bias"):
        path, _, leaf = name.partition(".")
        assert torch.equal(second.params[f"{path}.base.{leaf}"], first.params[name])
    assert cfl.load(tmp_path / "second").accuracies(STREAM) == second.accuracy_matrix[-1].tolist()


def test_nodes_get_the_frozen_parameters_once(tmp_path):
    # Nodes draw the network by the seed, and do not read the folder of the run before: they have to be sent its layers.
    cfl.run(toy.config("tasks=3", method="fedavg"), stream=STREAM, output=tmp_path)
    options = ("tasks=3", *ADAPTED, f"start={tmp_path}", "seed=4", "rounds=1")
    here = cfl.run(toy.config(*options, method="fedavg"), stream=STREAM)
    sink = toy.Rows()
    remote = ("engine=flower", "flower.address=in-process", "workers=1")
    there = cfl.run(toy.config(*options, *remote, method="fedavg"), stream=STREAM, sink=sink)
    assert torch.allclose(toy.flat(there.params), toy.flat(here.params), atol=1e-6)
    assert not torch.allclose(toy.flat(here.params), toy.flat(here.model.params), atol=1e-3)
    down = [row["wire_bytes_down"] for row in sink.rows]
    assert down[0] - down[1] > 96 * 4 and abs(down[1] - down[2]) < 96  # 96 frozen numbers


def test_networks_of_the_users_own_get_adapters():
    result = cfl.run(
        toy.config(*ADAPTED, method="fedavg"), stream=STREAM, model=nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 2))
    )
    assert {name for name in result.params if "@" not in name} == {
        "0.base.weight", "0.base.bias", "0.a.weight", "0.b.weight",
    }  # fmt: skip
