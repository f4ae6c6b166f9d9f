"""FedDyn: both steps by hand, the first-order condition, whole runs against the algorithm, and its fixed point."""

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.contract.losses import masked_mean
from cfl.core import ConfigError, optim, tree
from cfl.core.options import build
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import FedDyn
from cfl.models import Model
from cfl.runtime.builder import build_session
from tests import toy


def test_penalty_by_hand():
    # alpha / 2 |w - w_g|^2 = 0.25 (4 + 9) = 3.25; <h, w> = 2 * 3 - 1 * 1 = 5
    shared = {"params": {"a": torch.tensor(1.0), "b": torch.tensor(-2.0)}}
    state, params = {"a": torch.tensor(2.0), "b": torch.tensor(-1.0)}, {"a": torch.tensor(3.0), "b": torch.tensor(1.0)}
    penalty = FedDyn(alpha=0.5).penalty(params, torch.zeros(1, 2), toy.context(shared, state, None))
    assert penalty.item() == pytest.approx(3.25 - 5.0)


def test_a_clients_term_by_hand():
    # h <- 2 - 0.5 (3 - 1) = 1; a leaf that does not train keeps its term; a running mean has none
    shared = {"params": {"a": torch.tensor(1.0), "still": torch.tensor(4.0)}}
    ctx = toy.context(shared, {"a": torch.tensor(2.0), "still": torch.tensor(7.0)}, None)
    upload, state = FedDyn(alpha=0.5).finish({"a": torch.tensor(3.0), "mean": torch.tensor(8.0)}, ctx, 1)
    assert not upload and {name: leaf.item() for name, leaf in state.items()} == {"a": 1.0, "still": 7.0}


def test_the_servers_step_by_hand_with_half_of_the_clients():
    # Half of the clients, mean of w_g - w_i 0.3: h <- 0.2 + 0.5 * 0.5 * 0.3 = 0.275, and the step is 0.3 + 0.275 / 0.5
    model = Model(toy.net(nn.Linear(1, 2)), (1,), [2], multi_head=False)
    info = replace(toy.consolidation(model, clients=(0, 3)), fraction=0.5)
    mean = {"a": torch.tensor(0.3), "running": torch.tensor(9.0)}
    own = {"a": torch.tensor(0.2), "still": torch.tensor(1.0)}
    step, own = FedDyn(alpha=0.5).server_step(mean, own, {}, {}, info)
    assert step["a"].item() == pytest.approx(0.85) and step["running"].item() == 9.0
    assert own["a"].item() == pytest.approx(0.275) and own["still"].item() == 1.0


def test_statistics_have_no_term():
    model = Model(toy.net(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)), (3,), [2, 2], multi_head=True)
    for own in (FedDyn().init_client(model.params, model), FedDyn().init_shared(model.params, model)):
        assert set(own) == {*model.trainable(0), *model.trainable(1)}
        assert not any(leaf.any() for leaf in own.values())


@pytest.mark.parametrize("alpha", [0.2, 1.0])
def test_after_exact_minimisation_a_clients_term_is_the_gradient_of_its_own_loss(alpha):
    """h - alpha (w_i - w_g) = grad L(w_i): the condition of the first order, for logistic regression."""
    model = Model(toy.net(nn.Linear(3, 3)), (3,), [3], multi_head=False)
    step = LocalStep(
        model, 0, frozenset(), ComposedMethod({"strategy": Strategy(), "feddyn": FedDyn(alpha=alpha)}), optim.sgd()
    )
    x, y = toy.random(12, 3), torch.arange(12) % 3
    batch = Batch(x, y, torch.ones(12, dtype=torch.float64), torch.arange(12))
    state = step.composed.client_state(None, model.params, model)
    shared = {"params": model.params}
    for _ in range(2):  # from h = 0, and from the h after that
        local = step.start(shared["params"])
        for index in range(600):  # the curvature is below 2: a step of 0.3 removes at least 0.3 alpha of the distance
            local, _ = step(local, StepInputs(shared, batch, state=state, lr=0.3, step=index))
        _, state = step.composed.finish(
            local.params, step.context(StepInputs(shared, state=state, lr=0.3, step=600)), 600
        )
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in local.params.items()}
        grads = torch.autograd.grad(F.cross_entropy(model.logits(leaves, x, 0), y), list(leaves.values()))
        for name, grad in zip(leaves, grads, strict=True):
            assert grad.abs().max() > 1e-2
            assert torch.allclose(state[f"feddyn/{name}"], grad, atol=1e-10, rtol=0), name
        shared = {"params": {name: leaf + 0.1 for name, leaf in local.params.items()}}


@dataclass(frozen=True)
class Quadratic(Strategy):
    """Loss (w x - y)^2 / 2: a client with a large x has a steep loss."""

    def loss(self, logits, ctx):
        return masked_mean((logits[:, 0] - ctx.batch.y).square() / 2, ctx.batch.mask)


SLOPES, SIZES = (1.0, 2.0, 0.5), (2, 4, 6)  # of the client that holds class 0, 1, 2


def quadratics(*overrides, members=None):
    """Three clients, of 2, 4 and 6 samples, with loss (x_k w - k)^2 / 2 each."""
    x = torch.cat([torch.full((size, 1), slope) for slope, size in zip(SLOPES, SIZES, strict=True)])
    y = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES))
    options = ("tasks=1", "partition.name=classes", "partition.clients=3", "local.batch_size=2", "local.lr=0.2")
    config = toy.config(*options, "cohort=3", "rounds=70", *overrides, method="fedavg")
    members = {"strategy": Quadratic(), **({"feddyn": FedDyn(alpha=1.0)} if members is None else members)}
    stream = cfl.from_tensors([(x, y, x, y)])
    return build_session(config, stream, members, toy.net(nn.Linear(1, 3, bias=False)))


def optimum(weights):
    """Of sum_k p_k (x_k w - k)^2 / 2: sum p_k x_k k / sum p_k x_k^2."""
    over = sum(p * x * k for k, (p, x) in enumerate(zip(weights, SLOPES, strict=True)))
    return over / sum(p * x * x for p, x in zip(weights, SLOPES, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "weights"),
    [
        (("agg.weights=uniform",), (1, 1, 1)),
        (("agg.weights=samples",), SIZES),  # the optimum of the loss averaged by samples
        (("agg.weights=uniform", "cohort=2"), (1, 1, 1)),
    ],
    ids=["uniform", "samples", "two of three"],
)
def test_the_fixed_point_is_the_global_optimum(options, weights):
    ends = {}
    for name, members in (("feddyn", None), ("fedavg", {})):
        run = quadratics(*options, "local.epochs=2", members=members)
        for position in range(70):
            run.round(position)
        ends[name] = run.state.server["params"]["0.weight"][0].item()
    assert ends["feddyn"] == pytest.approx(optimum(weights), abs=1e-6)
    assert abs(ends["fedavg"] - optimum(weights)) > 0.02  # clients take 2, 4 and 6 steps on losses of unequal slopes


def test_the_servers_term_is_the_mean_of_all_clients_terms():
    run = quadratics("agg.weights=uniform")
    for position in range(5):
        run.round(position)
        mine = torch.stack([tree.part(state, "feddyn")["0.weight"] for state in run.state.clients.values()])
        assert len(mine) == 3 and mine.abs().max() > 0.01
        assert torch.allclose(run.state.server["local/feddyn"]["0.weight"], mine.mean(0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
def test_rounds_with_partial_participation_are_the_papers_algorithm(weights):
    alpha, population = 0.3, 5
    options = ("tasks=1", "rounds=8", "cohort=2", f"partition.clients={population}", f"agg.weights={weights}")
    config = toy.config(*options, "partition.name=dirichlet", "partition.alpha=1.0", method="fedavg")
    members = {"strategy": Strategy(), "feddyn": FedDyn(alpha=alpha)}
    run = build_session(config, toy.stream(tasks=1), members, toy.mlp(8, 5, 2))
    w = dict(run.model.params)
    h = {name: torch.zeros_like(leaf) for name, leaf in w.items()}
    own = {client: dict(h) for client in range(population)}
    for position in range(8):
        ends, sizes = {}, {client.id: len(client) for client in run.prepare(position).clients}
        run.round(position, lambda info, client, params, ends=ends: ends.update({client: params}))
        held = [len(rows) for rows in run.population.deals[0].rows]
        taking_part = sum(sizes.values()) / sum(held) if weights == "samples" else 2 / population
        p = {id: size / sum(sizes.values()) if weights == "samples" else 0.5 for id, size in sizes.items()}
        for id, local in ends.items():
            own[id] = {name: own[id][name] - alpha * (local[name] - w[name]) for name in w}
        for name, leaf in w.items():
            mean = sum(p[id] * local[name] for id, local in ends.items())
            # Algorithm 1 has 1 / N times the sum of w_i - w_g over the clients of the round
            h[name] = h[name] - alpha * taking_part * (mean - leaf)
            w[name] = mean - h[name] / alpha
            assert torch.allclose(run.state.server["params"][name], w[name], atol=1e-10, rtol=0)
            assert torch.allclose(run.state.server["local/feddyn"][name], h[name], atol=1e-10, rtol=0)
            for id in ends:
                assert torch.allclose(run.state.clients[id][f"feddyn/{name}"], own[id][name], atol=1e-10, rtol=0)
            shares = [size / sum(held) if weights == "samples" else 1 / population for size in held]
            mean_of_own = sum(share * own[id][name] for id, share in enumerate(shares))
            assert torch.allclose(h[name], mean_of_own, atol=1e-10, rtol=0)
    assert len({len(client) for client in run.prepare(0).clients}) == 2  # the two weightings differ


def test_alpha_must_be_positive():
    with pytest.raises(ConfigError, match=r"regularizer\.feddyn\.alpha must be a number in \(0, inf\), not 0"):
        build(FedDyn, {"alpha": 0.0}, "regularizer.feddyn")
