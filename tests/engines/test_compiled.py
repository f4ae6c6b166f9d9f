"""Compiled steps: equal to traces up to rounding, and to the byte after a kill; what is not compiled, and why."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import compile_fx
from torch._inductor import config as settings

import cfl
from cfl.core import ConfigError
from cfl.engines import compiled as module
from cfl.engines import traced
from cfl.engines.choose import Choice
from cfl.models import Model
from cfl.runtime import builder
from tests import toy
from tests.engines.test_vmapped import images
from tests.runtime.test_resume import Killed, Stop, finished

SGD = torch.ops.aten._fused_sgd_.tensor_lr
OPTIONS = ("tasks=2", "cohort=3", "engine=vmapped", "block=3", "local.batch_size=4", "local.lr=0.1")


@pytest.fixture
def compilations(monkeypatch):
    """The graphs that are compiled."""
    graphs, compiled = [], traced.compiled

    def noted(graph, leaves):
        graphs.append(graph)
        return compiled(graph, leaves)

    monkeypatch.setattr(traced, "compiled", noted)
    return graphs


def weights(*overrides, method="fedavg", model=None):
    config = toy.config(*OPTIONS, *overrides, method=method)
    return cfl.run(config, stream=toy.stream(tasks=2, multi_head=False), model=model).params


def largest(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("block", [1, 3])
def test_steps_with_convolutions_are_compiled(block, precision, compilations):
    """The second convolution has 4 samples x 2 x 2 places and 16 outputs: with its gradients it becomes products."""

    def network():
        torch.manual_seed(0)
        layers = nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4, track_running_stats=False), nn.ReLU()
        return nn.Sequential(*layers, nn.Conv2d(4, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))

    more = (f"block={block}", f"precision={precision}", "model.norm_stats=batch")
    plain = weights(*more, model=network())
    assert not compilations
    found = weights("compile=true", *more, model=network())
    kinds = [node.target for graph in compilations for node in graph.graph.nodes]
    assert kinds.count(torch.ops.aten.convolution.default) == len(compilations)  # of the first one
    assert kinds.count(torch.ops.aten.convolution_backward.default) == len(compilations)
    assert largest(found, plain) < (1e-5 if precision == "float32" else 0.02)


class Network(nn.Module):
    """A network for images. Its second convolution has one output channel, the third and fourth become products.

    draws: whether the step has draws that keep it from being compiled; viewing: whether its forward calls `view`.
    """

    def __init__(self, draws=False, viewing=False):
        super().__init__()
        torch.manual_seed(0)
        sizes = (1, 4), (4, 1), (1, 64), (64, 64)
        self.layers = nn.ModuleList(nn.Conv2d(*pair, 3, padding=1) for pair in sizes)
        self.pool, self.head, self.draws, self.viewing = nn.AvgPool2d(2), nn.Linear(64 * 9, 2), draws, viewing

    def forward(self, x):
        x = self.pool(self.layers[0](x).relu())
        for layer in self.layers[1:]:
            x = layer(x).relu()
        if self.draws:
            x = x + 0 * torch.randn_like(x)
        return self.head(x.view(len(x), -1) if self.viewing else x.flatten(1))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"viewing": True}, {"draws": True}])
def test_single_clients_with_images(options, compilations, monkeypatch):
    """The weights of two convolutions and of the head descend in any layout; the others are updated by the kernel."""
    found, take_out = [], traced.take_out

    def noted(graph):
        found.append(take_out(graph))
        return found[-1]

    monkeypatch.setattr(traced, "take_out", noted)
    assert Model(Network(**options), (1, 6, 6), [2], multi_head=False).layout.allowed == (not options.get("viewing"))

    def run(*overrides):
        config = toy.config(*OPTIONS, "block=1", *overrides, method="fedavg")
        return cfl.run(config, stream=images(), model=Network(**options)).params

    plain, after = run(), run("compile=true")
    assert compilations and [len(each) for each in found] == [3] * len(compilations)
    updates = [graph.graph.find_nodes(op="call_function", target=SGD) for graph in compilations]
    assert [len(node.args[0]) for nodes in updates for node in nodes] == [7] * len(compilations)  # of ten leaves
    assert largest(plain, after) < 1e-5


class Factored(nn.Module):
    """A classifier whose weight is the product of two parameters."""

    def __init__(self):
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        self.a = nn.Parameter(torch.randn(3, 8, generator=draws))
        self.b = nn.Parameter(torch.randn(2, 3, generator=draws))

    def forward(self, x):
        return nn.functional.linear(x, self.b @ self.a)


def test_a_product_of_weights_is_trained_as_without_compiling(compilations):
    found = weights("compile=true", model=Factored())
    assert compilations and largest(found, weights(model=Factored())) < 1e-5


def test_batches_of_a_single_client_do_not_depend_on_those_of_others(compilations):
    """Poisson batches of three clients have many sizes, of which the largest would be seen in the strides."""
    private = "dp.level=example", "dp.noise_multiplier=1.5", "dp.clip=0.3", "agg.weights=uniform"
    weights("compile=true", "block=1", "local.epochs=2", *private)
    assert len(compilations) == 1


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", ("local.weight_decay=0.1",)),  # the update is compiled with the gradient
        *(
            pytest.param(method, more, marks=pytest.mark.slow)
            for method, more in [
                ("scaffold+fedprox", ("local.momentum=0.9",)),  # momentum's update is not
                ("fedavg+fedsol", ("local.optimizer=adam", "local.lr=0.01")),
                ("fedavg", ("model.adapter=lora", "model.adapter_rank=2")),  # frozen parameters are constants
            ]
        ),
    ],
)
def test_compiled_steps_equal_traces_up_to_rounding(method, more, compilations):
    plain = weights(*more, method=method)
    assert not compilations
    found = weights("compile=true", *more, method=method)
    assert compilations and largest(found, plain) < 1e-5
    start = toy.config(*OPTIONS, *more, "rounds=1", "local.lr=1e-9", method=method)
    moved = cfl.run(start, stream=toy.stream(tasks=2, multi_head=False)).params
    assert largest(plain, moved) > 0.01  # there was something to learn


def test_an_update_by_hand():
    """w = 2, gradient 3, decay 0.5: w - 0.1 (3 + 0.5 * 2) = 1.6; a compiled trace writes it in place."""
    weight, grad, lr = torch.tensor([2.0]), torch.tensor([3.0]), torch.tensor(0.1, dtype=torch.float64)

    def work(inputs, kind):
        (param,), (slope,), (rate,) = (tuple(inputs[name].values()) for name in ("params", "grads", "lr"))
        torch._fused_sgd_(
            [param], [slope], [], weight_decay=0.5, momentum=0.0, lr=rate, dampening=0.0, nesterov=False,
            maximize=False, is_first_step=False,
        )  # fmt: skip
        return {"": {"twice": 2 * slope}}

    inputs = {"params": {"w": weight}, "grads": {"w": grad}, "lr": {"": lr}}
    result = traced.Traces()(work, inputs, task=0, alike=True, compile=True)
    assert weight.item() == pytest.approx(1.6) and result[""]["twice"].item() == 6.0


def test_a_repeated_pass_is_computed_once(monkeypatch):
    """FedSOL's step has the body's pass at the same weights twice, for the divergence and for the perturbed loss.

    Of the batched products with the 8 inputs, one is left: the global model's is not batched, as its weights are those
    of all clients, and the gradient's is part of the update.
    """
    products, compile_fx_inner = [], compile_fx.compile_fx_inner

    def noted(graph, fakes):
        nodes = graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
        products.append(sum(any(8 in factor.meta["val"].shape for factor in node.args) for node in nodes))
        return compile_fx_inner(graph, fakes)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", noted)
    weights("compile=true", method="fedavg+fedsol")
    assert products and set(products) == {1}


def test_only_whole_blocks_with_whole_batches_are_compiled(compilations):
    """Of 3 clients with 6 samples each, the first batch has 4 samples and the second one 2."""
    weights("compile=true", "local.epochs=2")
    inputs = [node.meta["val"] for graph in compilations for node in graph.graph.nodes if node.op == "placeholder"]
    assert len(compilations) == 1 and {leaf.shape for leaf in inputs if leaf.dim() == 3} >= {(3, 4, 8)}


def test_compiled_steps_make_the_draws_of_traces(compilations):
    dropout = "model.dropout=[0.2,0.5]"
    found = weights("compile=true", dropout)
    draws = [node for graph in compilations for node in graph.graph.nodes if "rand_like" in str(node.target)]
    assert len(draws) == 2
    other = weights("model.dropout=[0.5,0.2]")
    assert largest(found, weights(dropout)) < 1e-5 < 0.01 < largest(found, other)


def test_steps_with_other_draws_are_traced(compilations):
    """Compiled, Bernoulli draws would have other values."""
    layers = nn.Flatten(), nn.Linear(8, 6), nn.Dropout(0.5), nn.Linear(6, 2)
    start = nn.Sequential(*layers).state_dict()

    def trained(compile):
        module = nn.Sequential(*layers)
        module.load_state_dict(start)
        return weights(f"compile={compile}", model=module)

    assert largest(trained("true"), trained("false")) < 1e-5 and len(compilations) == 1


def test_compile_without_blocks_has_no_effect(compilations):
    with pytest.warns(UserWarning, match="compile=true has no effect with engine=loop; set engine=vmapped"):
        weights("engine=loop", "compile=true")
    assert not compilations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "rounds"),
    [
        ("vmapped", 5),
        pytest.param("vmapped", 1, marks=pytest.mark.slow),
        pytest.param("pool+vmapped", 5, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_ends_with_the_bytes_of_the_whole_one(engine, rounds, tmp_path: Path):
    more = "rounds=4", f"engine={engine}", "workers=1", "compile=true", "model.dropout=[0.2,0.5]"
    config = toy.config(*OPTIONS, *more, method="fedavg+fedprox")
    whole = cfl.run(config, stream=toy.stream(), output=tmp_path / "whole")
    with pytest.raises(Killed):
        cfl.run(config, stream=toy.stream(), output=tmp_path / "killed", sink=Stop(rounds))
    resumed = cfl.run(config, stream=toy.stream(), output=tmp_path / "killed", resume=True)
    assert finished(tmp_path / "killed") == finished(tmp_path / "whole")
    assert all(torch.equal(leaf, whole.params[name]) for name, leaf in resumed.params.items())


def test_without_a_compiler_the_run_says_so_once_and_traces(tmp_path: Path):
    with settings.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.warns(UserWarning, match=r"compile=true: no C\+\+ compiler") as said:
            found = cfl.run(toy.config(*OPTIONS, "compile=true"), stream=toy.stream(), output=tmp_path / "run")
        assert len([each for each in said if "compile=true" in str(each.message)]) == 1
        cfl.run(toy.config(*OPTIONS, "compile=true"), stream=toy.stream(), output=tmp_path / "run", resume=True)
    plain = cfl.run(toy.config(*OPTIONS), stream=toy.stream(), output=tmp_path / "plain")
    assert all(torch.equal(leaf, found.params[name]) for name, leaf in plain.params.items())
    assert finished(tmp_path / "run")[:2] == finished(tmp_path / "plain")[:2]
    assert "compile: false\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_run_that_auto_compiled_needs_a_compiler_to_resume(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(builder, "choose", lambda *_, **__: Choice("vmapped", 3, 1, True))
    monkeypatch.setattr(traced, "compiled", lambda graph, leaves: graph)  # without the compiler's seconds
    config = toy.config("tasks=2", "cohort=3", "rounds=3", "engine=auto")
    with pytest.raises(Killed):
        cfl.run(config, stream=toy.stream(), output=tmp_path / "run", sink=Stop(2))
    assert "compile: true\n" in (tmp_path / "run" / "config.yaml").read_text()
    monkeypatch.undo()
    with settings.patch({"cpp.cxx": ("no-such-compiler",)}), pytest.raises(ConfigError, match="run to resume compiled"):
        cfl.run(config, stream=toy.stream(), output=tmp_path / "run", resume=True)


def test_obstacles(tmp_path: Path, monkeypatch):
    assert "cuda" in module.obstacle(torch.device("cuda")) and not module.obstacle(torch.device("cpu"))
    monkeypatch.setattr(module.sysconfig, "get_path", lambda *_: str(tmp_path))  # the compiled code includes Python.h
    assert module.obstacle(torch.device("cpu")).startswith("the C headers of Python are missing")


def test_a_compiler_that_fails_ends_the_run_with_the_option_at_fault(monkeypatch):
    import torch._inductor.compile_fx as compiler

    def fails(*_):
        raise RuntimeError("no space left")

    monkeypatch.setattr(compiler, "compile_fx_inner", fails)
    with pytest.raises(ConfigError, match="no space left; leave compile=true out"):
        weights("compile=true")
