"""SCAFFOLD: gradients by hand, exact mean gradients, the end of training, and a killed run."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import EMPTY, Batch, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import Scaffold
from cfl.models import Model
from cfl.runtime.builder import build_session
from cfl.runtime.sinks import NullSink
from tests import toy


def test_adjusted_gradient_by_hand():
    shared = {"params": {"w": torch.tensor([0.0, 0.0])}}
    ctx = toy.context(shared, {"w": torch.tensor([1.0, -2.0])}, None, sent={"w": torch.tensor([0.5, 4.0])})
    grads = Scaffold().adjust({"w": torch.tensor([3.0, 3.0])}, shared["params"], ctx)
    assert grads["w"].tolist() == [2.5, 9.0]  # 3 - 1 + 0.5 and 3 + 2 + 4


def test_control_variates_by_hand():
    # without momentum, lr 0.1, 2 steps: (w_g - w_i) / (2 * 0.1) = 0.6 / 0.2 = 3; c_i <- 1 - 0.5 + 3
    ctx = toy.context(
        {"params": {"w": torch.tensor(1.0)}}, {"w": torch.tensor(1.0)}, None, sent={"w": torch.tensor(0.5)}
    )
    upload, state = Scaffold().finish({"w": torch.tensor(0.4)}, ctx, 2)
    assert state["w"].item() == pytest.approx(3.5) and upload["w"].item() == pytest.approx(2.5)


class Linear(Strategy):
    """Loss <g, outputs>, with the same gradient at all weights."""

    def loss(self, logits, ctx):
        return (logits @ torch.tensor([2.0, -3.0], dtype=logits.dtype)).mean()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_constant_gradient_becomes_the_control_variate(steps, momentum):
    model = Model(toy.net(nn.Linear(1, 2)), (1,), [2], multi_head=False)
    step = LocalStep(
        model, 0, frozenset(), ComposedMethod({"strategy": Linear(), "scaffold": Scaffold()}), optim.sgd(momentum)
    )
    ones = torch.ones(3, 1, dtype=torch.float64)
    batch = Batch(ones, torch.zeros(3, dtype=torch.int64), ones[:, 0], torch.arange(3))
    gradient = {"0.weight": torch.tensor([[2.0], [-3.0]]).double(), "0.bias": torch.tensor([2.0, -3.0]).double()}
    state = step.composed.client_state(None, model.params, model)
    for sent in (0.0, 0.7):  # from c = c_i = 0, then from c_i = g with another c
        c = {name: torch.full_like(leaf, sent) for name, leaf in model.params.items()}
        shared, local = {"params": model.params, "local/scaffold": c}, step.start(model.params)
        for index in range(steps):
            local, _ = step(local, StepInputs(shared, batch, state=state, lr=0.1, step=index))
        _, state = step.composed.finish(
            local.params, step.context(StepInputs(shared, state=state, lr=0.1, step=steps)), steps
        )
        for name, leaf in gradient.items():
            assert torch.allclose(state[f"scaffold/{name}"], leaf, atol=1e-12, rtol=0), name


def session(*overrides, regularizers=None, clients=4, model=None):
    """A run whose clients take full-batch steps: 12 samples each, in one batch."""
    options = ("tasks=1", "rounds=6", "cohort=2", "local.lr=0.2", "local.epochs=3", "local.batch_size=12")
    config = toy.config(*options, f"partition.clients={clients}", "seed=2", *overrides, method="fedavg")
    members = {"strategy": Strategy(), **({"scaffold": Scaffold()} if regularizers is None else regularizers)}
    return build_session(config, toy.stream(tasks=1), members, model or toy.mlp(8, 5, 2))


def gradients(model, params, client):
    """Gradient of the mean cross-entropy over a client's samples, by autograd."""
    leaves = {name: leaf.detach().clone().requires_grad_() for name, leaf in params.items()}
    samples, rows = client.shares[0]
    x, y = samples.gather(rows)
    grads = torch.autograd.grad(F.cross_entropy(model.logits(leaves, x, 0), y), list(leaves.values()))
    return dict(zip(leaves, grads, strict=True))


def test_the_servers_variate_is_the_mean_of_all_clients():
    run = session("rounds=8", "local.momentum=0.9", "local.batch_size=5", "cohort=3", "partition.clients=6")
    for position in range(8):
        run.round(position)
        for name, leaf in run.state.server["local/scaffold"].items():
            mine = [tree.part(state, "scaffold")[name] for state in run.state.clients.values()]
            assert torch.allclose(leaf, sum(mine) / 6, atol=1e-12, rtol=0)  # clients without a state count as 0
    assert len(run.state.clients) > 3


def test_a_single_client_trains_as_under_fedavg():
    # then c = c_i: the correction is 0
    options = ("cohort=1", "local.batch_size=5", "local.momentum=0.9")
    ends = []
    for regularizers in (None, {}):
        run = session(*options, regularizers=regularizers, clients=1)
        for position in range(6):
            run.round(position)
        ends.append(run.state.server["params"])
    assert all(torch.allclose(ends[0][name], leaf, atol=1e-12, rtol=0) for name, leaf in ends[1].items())


@pytest.mark.slow
def test_the_drift_of_unlike_clients_vanishes():
    """With full participation the fixed point is the optimum of the mean loss; that of FedAvg is not."""
    slopes, options = {}, ("rounds=60", "cohort=4", "partition.name=shards", "partition.shards=1", "local.epochs=4")
    for name, regularizers in (("scaffold", None), ("fedavg", {})):
        logistic = toy.net(nn.Linear(8, 2))
        more = ("local.lr=0.5", "local.weight_decay=0.1")
        run = session(*options, *more, regularizers=regularizers, model=logistic)
        for position in range(60):
            run.round(position)
        params = run.state.server["params"]
        grads = [gradients(run.model, params, client) for client in run.prepare(0).clients]
        full = {name: sum(g[name] for g in grads) / 4 + 0.1 * params[name] for name in params}  # decay: 0.05 |w|^2
        slopes[name] = math.sqrt(sum(leaf.square().sum().item() for leaf in full.values()))
    assert slopes["scaffold"] < 1e-6 and slopes["fedavg"] > 1e-2


class Killed(BaseException):
    """Stands for SIGKILL: nothing in the package may catch it."""


def test_a_run_killed_within_a_task_resumes_to_the_same_bits(tmp_path):
    config = toy.config("rounds=4", "cohort=2", "local.momentum=0.9", method="fot+scaffold")

    class Kill(NullSink):
        def round(self, row):
            if (row["task"], row["phase"], row["round"]) == (1, "train", 1):
                raise Killed

    whole = cfl.run(config, stream=toy.stream(), output=tmp_path / "whole")
    with pytest.raises(Killed):
        cfl.run(config, stream=toy.stream(), output=tmp_path / "killed", sink=Kill())
    resumed = cfl.run(config, stream=toy.stream(), output=tmp_path / "killed", resume=True)
    assert all(torch.equal(resumed.params[name], leaf) for name, leaf in whole.params.items())
    without = [{**run.metrics, "seconds": None} for run in (resumed, whole)]
    assert without[0] == without[1]


def test_a_borrowed_variate_is_the_mean_gradient():
    """If FedSOL takes c - c_i out of the update, the drift is lr times the sum of the plain gradients."""
    model = Model(toy.net(nn.Linear(2, 2)), (2,), [2], multi_head=False)
    names = list(model.params)
    state = {name: toy.random(*model.params[name].shape, seed=1) for name in names}
    sent = {name: toy.random(*model.params[name].shape, seed=2) for name in names}
    gradient = {name: toy.random(*model.params[name].shape, seed=3) for name in names}
    trained = {name: model.params[name] - 0.1 * 5 * gradient[name] for name in names}  # five equal steps, lr 0.1
    ctx = toy.context({"params": model.params}, state, EMPTY, model, sent=sent, lr=0.1)
    for lent, expected in (
        (True, gradient),
        (False, {name: state[name] - sent[name] + gradient[name] for name in names}),
    ):
        upload, after = Scaffold().finish(trained, ctx._replace(lent=lent), 5)
        for name in names:
            assert torch.allclose(after[name], expected[name], atol=1e-12)
            assert torch.allclose(upload[name], expected[name] - state[name], atol=1e-12)
