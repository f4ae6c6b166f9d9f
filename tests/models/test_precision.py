"""Products in bfloat16 beside weights in float32."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import cfl
from cfl.core import CheckpointError, ConfigError, plugins
from cfl.models import Model, precision
from cfl.testing import check_strategy, toy_config, toy_stream

BELOW = 2.0**-8  # largest relative error of rounding to the 8 significant bits of bfloat16, and half a bit of slack
LOW = "precision=bf16"


def handle(*layers: nn.Module, shape: tuple[int, ...] = (2,), precision: str = "bf16") -> Model:
    torch.manual_seed(0)
    return Model(nn.Sequential(*layers), shape, [2], multi_head=False, precision=precision)


def rounded(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).float()


def test_by_hand_factors_are_rounded_and_weights_are_not() -> None:
    # 1 + 2^-9 lies between the bfloat16 numbers 1 and 1 + 2^-7, nearer to 1. So (1 + 2^-9) x 1 + 0 x 0 is 1 in
    # bfloat16, and 1 + 2^-9 in float32.
    model = handle(nn.Linear(2, 2, bias=False))
    near = 1 + 2.0**-9
    weights = {"0.weight": torch.tensor([[near, 0.0], [0.0, near]])}
    x = torch.tensor([[1.0, 1.0]])
    assert model.predict(weights, x, 0).tolist() == [[1.0, 1.0]]
    assert model.logits(weights, x, 0).tolist() == [[near, near]]
    assert weights["0.weight"][0, 0] == near


def test_a_gradient_is_that_of_rounded_factors_by_brute_force() -> None:
    model = handle(nn.Linear(20, 2), shape=(20,))
    x, y = torch.randn(8, 20), torch.arange(8) % 2
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in model.params.items()}
    with model.lowered():
        F.cross_entropy(model.logits(leaves, x, 0), y).backward()
    weight, bias = model.params["0.weight"], model.params["0.bias"]
    logits = rounded(rounded(x) @ rounded(weight).T + rounded(bias))
    error = rounded((logits.softmax(1) - F.one_hot(y, 2)) / 8)  # of the logits, as it enters the products
    expected = rounded(error.T @ rounded(x))
    assert leaves["0.weight"].grad.dtype == torch.float32
    torch.testing.assert_close(leaves["0.weight"].grad, expected, rtol=BELOW, atol=BELOW * float(expected.abs().max()))
    exact = torch.autograd.functional.jacobian(lambda w: F.cross_entropy(F.linear(x, w, bias), y), weight)
    assert not torch.equal(leaves["0.weight"].grad, exact)


def test_outside_of_steps_and_predictions_everything_is_float32() -> None:
    layers = nn.Linear(2, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)
    low, usual = handle(*layers), handle(*layers, precision="float32")
    x = torch.randn(5, 2)
    with low.evaluation(), usual.evaluation():
        assert torch.equal(low.logits(low.params, x, 0), usual.logits(low.params, x, 0))
        assert torch.equal(low.features(low.params, x, 0), usual.features(low.params, x, 0))
        assert not torch.equal(low.predict(low.params, x, 0), usual.predict(low.params, x, 0))


def test_hooks_see_features_and_logits_in_float32() -> None:
    model = handle(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
    with model.lowered(), model.watched_features() as seen:
        assert model.logits(model.params, torch.randn(5, 2), 0).dtype == torch.float32
    assert seen[0].dtype == torch.float32


def test_updates_smaller_than_a_bfloat16_step_are_not_lost() -> None:
    # With lr = 1e-6 steps are far below the spacing of bfloat16 numbers near weights of 0.1, which is 2^-11.
    stream = toy_stream(multi_head=False)
    ends = [
        cfl.run(toy_config(LOW, "rounds=1", "tasks=1", f"local.lr={lr}"), stream=stream, progress=False).params
        for lr in (1e-6, 1e-30)
    ]
    steps = {name: float((leaf - ends[1][name]).abs().max()) for name, leaf in ends[0].items()}
    assert all(0 < step < 1e-5 for step in steps.values()), steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [("fot", ["tasks=2"]), *(pytest.param(name, [], marks=pytest.mark.slow) for name in ("fedavg", "fot", "er"))],
)
def test_strategies_pass_the_conformance_kit(name: str, more: list[str]) -> None:
    check_strategy(plugins.strategies.get(name)(), config=toy_config(LOW, *more))


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(6, track_running_stats=False), nn.GroupNorm(2, 6), nn.LayerNorm(6)], ids=repr
)
def test_normalisation_returns_bfloat16_as_it_is_given_under_vmap_too(norm: nn.Module) -> None:
    model = handle(nn.Linear(2, 6, bias=False), norm, nn.Linear(6, 2))
    seen: list[torch.dtype] = []
    model.module[1].register_forward_hook(lambda *call: seen.append(call[2].dtype))
    x = torch.randn(8, 2)
    with model.lowered():
        alone = model.logits(model.params, x, 0)
        stacked = {name: leaf[None] for name, leaf in model.params.items()}
        blocked = torch.func.vmap(lambda leaves: model.logits(leaves, x, 0))(stacked)[0]
    assert seen == [torch.bfloat16] * 2
    torch.testing.assert_close(blocked, alone, rtol=2 * BELOW, atol=2 * BELOW)


def test_convolutions_of_local_steps_are_rounded_in_blocks_too() -> None:
    """Autocast reaches a convolution under vmap if a gradient is computed there, as in a local step."""
    x, weights = torch.randn(8, 2, 4, 4), torch.randn(3, 6, 2, 1, 1)
    seen: list[torch.dtype] = []

    def loss(weight: torch.Tensor) -> torch.Tensor:
        seen.append((out := F.conv2d(x, weight)).dtype)
        return out.float().square().sum()

    with precision.lowered(torch.device("cpu")):
        blocked = torch.func.vmap(torch.func.grad(loss))(weights)
        alone = torch.stack([torch.func.grad(loss)(weight) for weight in weights])
    exact = torch.stack([torch.func.grad(loss)(weight) for weight in weights])
    assert seen == [*[torch.bfloat16] * 4, *[torch.float32] * 3]
    torch.testing.assert_close(blocked, alone, rtol=2 * BELOW, atol=2 * BELOW)
    assert not torch.allclose(blocked, exact, rtol=BELOW / 16)


def test_normalisation_runs_in_blocks_of_clients() -> None:
    # torch.func takes no bfloat16 inputs beside float32 statistics; there the layers convert them.
    layers = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)
    stream = toy_stream(multi_head=False)
    runs = [
        cfl.run(
            toy_config(LOW, f"engine={engine}", "block=2", "model.norm_stats=running"),
            stream=stream,
            model=nn.Sequential(*layers),
            progress=False,
        )
        for engine in ("loop", "vmapped")
    ]
    for name, leaf in runs[0].params.items():
        torch.testing.assert_close(runs[1].params[name], leaf, rtol=4 * BELOW, atol=4 * BELOW)


def test_a_run_in_bfloat16_does_not_continue_in_float32(tmp_path: Path) -> None:
    stream = toy_stream(multi_head=False)
    cfl.run(toy_config(LOW), stream=stream, output=tmp_path, progress=False)
    with pytest.raises(CheckpointError, match="precision"):
        cfl.run(toy_config(), stream=stream, output=tmp_path, resume=True, progress=False)


def test_precision_is_said_at_the_start_and_slow_processors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    monkeypatch.setattr(precision, "fast", lambda device: False)
    assert [note.partition(":")[0] for note in precision.notes("bf16", cpu)] == [
        "precision=bf16",
        "this device multiplies bfloat16 matrices more slowly",
    ]
    monkeypatch.setattr(precision, "fast", lambda device: True)
    assert len(precision.notes("bf16", cpu)) == 1
    assert precision.notes("float32", cpu) == []


@pytest.mark.parametrize(("seconds", "fast"), [(1e-3, True), (4e-3, False)])
def test_a_processor_is_fast_if_its_products_are(seconds: float, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    times = {torch.bfloat16: seconds, torch.float32: 2e-3}
    monkeypatch.setattr(precision, "_seconds", times.__getitem__)
    assert precision.fast(torch.device("cpu")) is fast


def test_a_product_takes_time() -> None:
    assert 0 < precision._seconds(torch.float32) < 1


def test_a_wrong_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision"):
        cfl.resolve("permuted-digits", overrides=["precision=bf32"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cfl.resolve("permuted-digits", overrides=["precision=bf16"]).precision == "bf16"


class ByKeyword(nn.Module):
    """A network that names the input of its normalisation layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(input=self.body(x)).relu())


class Conditional(nn.LayerNorm):
    """A normalisation layer with a second argument."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


class TwoArguments(nn.Module):
    """A network with such a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(8, 8), Conditional(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x), torch.tensor(0.5)).relu())


class Quantized(nn.Module):
    """A network whose first parameter is a frozen matrix of integers."""

    def __init__(self) -> None:
        super().__init__()
        levels = torch.arange(48).reshape(6, 8) % 7 - 3
        self.levels, self.head = nn.Parameter(levels, requires_grad=False), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x @ self.levels.float().t() / 4).relu())


@pytest.mark.parametrize("network", [ByKeyword, TwoArguments, Quantized])
@pytest.mark.parametrize("engine", [["engine=loop"], ["engine=vmapped", "block=3"]], ids=["loop", "vmapped"])
def test_networks_of_float32_train_in_bfloat16_too(network: type[nn.Module], engine: list[str]) -> None:
    torch.manual_seed(0)
    model, few = network(), ["rounds=1", *engine]
    found = [
        cfl.run(toy_config(*few, *low, method="fedavg"), stream=toy_stream(1), model=model).params
        for low in ([], [LOW])
    ]
    assert not torch.equal(*(params["head.weight"] for params in found))
    torch.testing.assert_close(*(params["head.weight"] for params in found), rtol=0.05, atol=0.01)
