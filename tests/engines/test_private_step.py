"""DP-SGD in the local step: per-sample gradients against Opacus and autograd, clipping, and noise."""

import math
import warnings
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.aggregation.gaussian import SampleNoise, noise
from cfl.assembly import methods as members
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, plugins, rng, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedProx
from cfl.models import Model
from cfl.runtime.builder import build_session
from tests import toy

SIZE, LR, CLIP = 6, 0.1, 0.5
EXACT = SampleNoise(1e6, 0.0, SIZE, seed=0)  # clips no gradient and adds no noise


def mlp():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 5, 2), nn.Tanh(), nn.Flatten(),
        nn.Linear(20, 3),
    )  # fmt: skip


NETS = {"mlp": (mlp, (4,)), "cnn": (convnet, (1, 6, 6))}


@dataclass(frozen=True)
class Seen(SampleNoise):
    """Keeps the per-sample gradients and their mean."""

    calls: list = field(default_factory=list)

    def __call__(self, grads, mask, drawn):
        mean = super().__call__(grads, mask, drawn)
        self.calls.append((grads, mean))
        return mean


def make(net, mechanism, optimizer=None, composed=None, **options):
    module, shape = NETS[net]
    with rng.fork(1):
        model = Model(module(), shape, [3], multi_head=False)
    model.module.train()
    composed = ComposedMethod({"strategy": Strategy()} if composed is None else composed)
    return model, LocalStep(model, 0, frozenset(), composed, optimizer or optim.sgd(), noise=mechanism, **options)


def batch(net, samples=SIZE, scale=1.0, seed=0):
    source = rng.generator(seed)
    x = scale * torch.randn(samples, *NETS[net][1], generator=source)
    return Batch(x, torch.randint(3, (samples,), generator=source), torch.ones(samples), torch.arange(samples))


def gradient(net, mechanism, data, key=7, composed=None, away=0.0):
    """The gradient for the optimiser: minus an SGD step of rate 1. away: offset of the weights from the global ones."""
    model, step = make(net, mechanism, composed=composed)
    start = tree.map(lambda leaf: leaf + away, model.params)
    after, _ = step(step.start(start), StepInputs({"params": model.params}, data, lr=1.0, key=key))
    return tree.sub(start, after.params)


def length(a):
    return float(toy.flat(a).double().norm())


# --- per-sample gradients -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", NETS)
def test_per_sample_gradients_equal_those_of_opacus_and_autograd(net):
    from opacus import GradSampleModule

    mechanism = Seen(CLIP, 0.0, SIZE, seed=0)
    model, step = make(net, mechanism)
    data = batch(net)
    step(step.start(model.params), StepInputs({"params": model.params}, data, lr=LR))
    ((ours, _),) = mechanism.calls

    with rng.fork(1):
        reference = NETS[net][0]()
    assert all(torch.equal(leaf, model.params[name]) for name, leaf in reference.named_parameters())
    each = []
    for x, y in zip(data.x, data.y, strict=True):
        loss = F.cross_entropy(reference(x[None]), y[None])
        each.append(torch.autograd.grad(loss, list(reference.parameters())))
    for (name, _), one_by_one in zip(reference.named_parameters(), zip(*each, strict=True), strict=True):
        torch.testing.assert_close(ours[name], torch.stack(one_by_one), rtol=1e-5, atol=1e-6)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of Opacus' backward hooks
        wrapped = GradSampleModule(reference, loss_reduction="mean")
        F.cross_entropy(wrapped(data.x), data.y).backward()
    for name, leaf in reference.named_parameters():
        torch.testing.assert_close(ours[name], leaf.grad_sample, rtol=1e-5, atol=1e-6)


OPTIMIZERS = {"sgd": optim.sgd(momentum=0.9, weight_decay=1e-2), "adam": optim.adam(weight_decay=1e-2)}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("net", NETS)
def test_without_clipping_and_noise_the_step_equals_the_plain_one(net, optimizer):
    results = []
    for mechanism in (None, EXACT):
        model, step = make(net, mechanism, OPTIMIZERS[optimizer])
        local = step.start(model.params)
        for index in range(2):
            local, loss = step(
                local, StepInputs({"params": model.params}, batch(net, seed=index), lr=LR, step=index, key=index)
            )
        results.append((local, loss))
    (plain, plain_loss), (private, private_loss) = results
    assert private_loss.item() == pytest.approx(plain_loss.item(), abs=1e-6)
    for name, leaf in plain.params.items():
        # Adam divides by the root of the squared gradients, which amplifies rounding errors
        torch.testing.assert_close(private.params[name], leaf, rtol=1e-5, atol=1e-6 if optimizer == "sgd" else 1e-4)


def registered(safe):
    """Names of the package's strategies and regularizers with that value of `per_sample`."""
    items = [(name, kind.get(name)) for kind in (plugins.strategies, plugins.local) for name in kind.names()]
    own = [(name, item) for name, item in items if item.__module__.startswith("cfl.")]
    return [name for name, item in own if vars(item).get("per_sample", False) == safe]


def plain_and_private(name):
    """The weights after one step in the second task of a run: by the batch gradient, then by per-sample gradients."""
    config = toy.config("local.batch_size=6", "public.name=stream", method=name)
    session = build_session(config, toy.stream(), members.build(config))
    last = 3  # by then control variates, teachers and earlier models exist
    while not session.schedule[last][1].train:
        last += 1
    for position in range(last):
        session.round(position)
    info, shared, clients, states = session.prepare(last)
    client, first = clients[0], next(clients[0].batches(SIZE))
    session.model.module.train()
    for mechanism in (None, EXACT):
        step = LocalStep(
            session.model, info.task, info.frozen, session.composed, optim.sgd(), heads=info.heads, public=info.public,
            noise=mechanism,
        )  # fmt: skip
        local = step.start(tree.map(lambda leaf: leaf + 0.01, shared["params"]))  # so that proximal terms are not 0
        local, _ = step(
            local,
            StepInputs(shared, first, state=states[client.id], lr=LR, step=1, key=3, client=torch.tensor(client.id)),
        )
        yield local.params


@pytest.mark.parametrize("name", registered(safe=True))
def test_per_sample_members_give_the_batch_gradient(name):
    """If samples enter only through their own losses, the mean per-sample gradient is the batch gradient."""
    plain, private = plain_and_private(name)
    assert set(plain) == set(private)
    for leaf, value in plain.items():
        torch.testing.assert_close(private[leaf], value, rtol=1e-5, atol=1e-6)


def test_this_comparison_detects_a_loss_across_samples():
    assert "fedrcl" in registered(safe=False)
    plain, private = plain_and_private("fedrcl")  # its loss contrasts the samples of a batch
    assert max(float((plain[leaf] - private[leaf]).abs().max()) for leaf in plain) > 1e-4


# --- clipping -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e3])
@pytest.mark.parametrize("net", NETS)
def test_a_sample_moves_the_sum_by_no_more_than_the_clip(net, scale):
    mechanism = SampleNoise(CLIP, 0.0, 1, seed=0)  # no division: the sum
    data = batch(net, scale=scale)
    whole = gradient(net, mechanism, data)
    moved = []
    for left_out in range(SIZE):
        kept = [number for number in range(SIZE) if number != left_out]
        without = gradient(net, mechanism, Batch(*(leaf[kept] for leaf in data[:4])))
        moved.append(length(tree.sub(whole, without)))
    assert max(moved) <= CLIP * (1 + 1e-5)
    assert length(whole) <= SIZE * CLIP
    if scale > 1:  # these gradients exceed the clip, so the bound is reached
        assert max(moved) == pytest.approx(CLIP, rel=1e-4)


def test_penalties_are_clipped_with_the_samples_gradient():
    """A strong proximal term far from the global model is clipped together with the sample's own gradient."""
    composed = {"strategy": Strategy(), "fedprox": FedProx(mu=1e4)}
    model, step = make("mlp", SampleNoise(CLIP, 0.0, 1, seed=0), composed=composed)
    far = tree.map(lambda leaf: leaf + 10.0, model.params)
    after, _ = step(step.start(far), StepInputs({"params": model.params}, batch("mlp"), lr=1.0))
    assert 0 < length(tree.sub(far, after.params)) <= SIZE * CLIP * (1 + 1e-5)


@pytest.mark.parametrize("net", NETS)
def test_padding_does_not_change_the_gradient(net):
    data = batch(net)
    padded = Batch(data.x * torch.tensor([1.0, 1, 1, 1, 1e3, 1e3]).reshape(-1, *[1] * (data.x.dim() - 1)), *data[1:])
    padded = padded._replace(mask=torch.tensor([1.0, 1, 1, 1, 0, 0]))
    cut = Batch(*(leaf[:4] for leaf in data[:4]))
    mechanism = SampleNoise(CLIP, 1.0, SIZE, seed=0)
    composed = {"strategy": Strategy(), "fedprox": FedProx(mu=1.0)}
    # same key, same noise
    a, b = (gradient(net, mechanism, part, composed=composed, away=0.5) for part in (padded, cut))
    for name, leaf in b.items():
        torch.testing.assert_close(a[name], leaf, rtol=1e-5, atol=1e-6)


# --- the noise ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("composed", [{}, {"fedprox": FedProx(mu=1.0)}], ids=["fedavg", "fedprox"])
def test_an_empty_draw_gives_noise_alone(composed):
    mechanism, key = SampleNoise(CLIP, 2.0, SIZE, seed=5), 13
    empty = batch("mlp", samples=1)._replace(mask=torch.zeros(1))  # as `Client.draws` returns it
    # far from the global model a proximal term has a gradient even for an empty batch
    found = gradient("mlp", mechanism, empty, key, {"strategy": Strategy(), **composed}, away=0.5)
    for name, leaf in found.items():
        alone = noise(leaf, CLIP * 2.0, 5, "sample noise", key, name) / SIZE
        torch.testing.assert_close(leaf, alone, rtol=1e-5, atol=1e-6)


def test_the_noise_of_the_mean_gradient_has_the_stated_standard_deviation():
    multiplier, keys = 1.7, 200
    data, expected = batch("mlp", samples=4), 9  # the divisor is the expected number, not the drawn one
    clean = gradient("mlp", SampleNoise(CLIP, 0.0, expected, seed=0), data)
    mechanism = SampleNoise(CLIP, multiplier, expected, seed=0)
    draws = torch.stack([toy.flat(tree.sub(gradient("mlp", mechanism, data, key), clean)) for key in range(keys)])
    std = CLIP * multiplier / expected
    numbers = draws.numel()  # 67 weights x 200 keys: relative error 1 / sqrt(2 x 13400) = 0.6 %
    assert numbers == 67 * keys
    assert draws.std() == pytest.approx(std, rel=4 / math.sqrt(2 * numbers))
    assert abs(draws.mean()) < 4 * std / math.sqrt(numbers)
    between = torch.corrcoef(draws)[0, 1:]  # independent between keys: |r| of 67 numbers is about 0.12
    assert between.abs().mean() < 0.15


def test_the_engine_draws_poisson_batches_and_protects_every_step(monkeypatch):
    """12 samples a client and 4 a step make 3 steps an epoch; 2 epochs, 3 clients, 2 rounds, 3 tasks."""
    seen = []

    def kept(self, grads, mask, drawn):
        seen.append((int(mask.sum()), float(toy.flat(drawn).norm()), self))
        return original(self, grads, mask, drawn)

    original = SampleNoise.__call__
    monkeypatch.setattr(SampleNoise, "__call__", kept)
    options = ("dp.level=example", "dp.noise_multiplier=1.5", "dp.clip=0.3", "agg.weights=uniform", "local.epochs=2")
    config = toy.config(*options, "dp.accountant=rdp", method="fedavg")
    result = cfl.run(config, stream=toy.stream())
    sizes = [size for size, _, _ in seen]
    assert len(sizes) == 3 * 2 * 3 * 2 * 3
    assert len({norm for _, norm, _ in seen}) == len(seen)  # no noise is used twice
    assert {mechanism for *_, mechanism in seen} == {SampleNoise(0.3, 1.5, 4, seed=0)}
    # each of the 12 samples is in a batch with probability 1/3: mean 4, variance 12 x 1/3 x 2/3
    assert sum(sizes) / len(sizes) == pytest.approx(4, abs=4 * math.sqrt(12 * 2 / 9 / len(sizes)))
    assert len(set(sizes)) > 3
    assert result.metrics["noise_multiplier"] == 1.5 and 0 < result.metrics["epsilon"] < math.inf
