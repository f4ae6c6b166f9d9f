"""FedProTIP: bases against brute force, projected gradients, what stays frozen, and FedAvg as the limit of one task."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cfl
from cfl.contract import EMPTY, Batch, Client, Share
from cfl.contract.combining import capped
from cfl.contract.composed import ComposedMethod
from cfl.core import optim
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.regularizers import NormBound
from cfl.methods.strategies import FedProTIP
from cfl.methods.subspace.layer_inputs import watch
from cfl.methods.subspace.sketch import pack, unpack
from tests import toy


def _handle(module, input_shape, tasks=3, **options):
    return cfl.Model(module, input_shape, [3] * tasks, **{"multi_head": False, **options})


def _client(x, task=0, id=0):
    y = torch.zeros(len(x), dtype=torch.int64)
    samples = cfl.from_tensors([(x, y, x[:1], y[:1])]).tasks[0].train
    return Client(id, {task: Share(samples, torch.arange(len(x)))}, task, (task,))


def _collected(strategy, model, clients, server=None, task=0):
    """The server after the clients' bases of a task. clients: their inputs."""
    server = server or {"params": model.params, **strategy.init_server(model.params, model)}
    info = toy.consolidation(model, task, range(len(clients)))
    ups = [strategy.work(model.params, _client(x, task, id), {}, {}, info)[0] for id, x in enumerate(clients)]
    return strategy.absorb(server, {"work": {name: sum(up[name] for up in ups) for name in ups[0]}}, info, 1.0)


def _inputs(model, x):
    """X (d, n) of each layer, by name."""
    found = {}
    with torch.no_grad(), watch(model, model.layers, lambda layer, rows: found.update({layer.name: rows})):
        model.logits(model.params, x, 0)
    return {name: rows.flatten(0, 1).T.numpy() for name, rows in found.items()}


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_gradient_by_hand():
    # (2, 1) has the component 2 along (0.6, 0.8): 2 - 1.2 = 0.8 and 1 - 1.6 = -0.6 remain. Biases are not projected.
    model = _handle(toy.net(nn.Linear(2, 3)), (2,))
    ctx = toy.context({"basis": {"0": torch.tensor([[0.6], [0.8]]).double()}}, {}, EMPTY, model)
    grads = {"0.weight": torch.tensor([[2.0, 1.0]] * 3).double(), "0.bias": torch.ones(3).double()}
    found = FedProTIP().adjust(grads, grads, ctx)
    assert found["0.weight"][0].tolist() == pytest.approx([0.8, -0.6]) and found["0.bias"] is grads["0.bias"]


@pytest.mark.parametrize(("threshold", "rank"), [(0.7, 1), (0.8, 2), (0.95, 2), (0.96, 3)])
def test_a_basis_by_hand(threshold, rank):
    # Two clients have the energies (16, 1, 0) and (0, 4, 1) on the axes, 22 in all. Up to 0.8 each sends its largest,
    # so the sum is (16, 4, 0): 0.7 x 22 = 15.4 takes one direction, 0.8 x 22 = 17.6 two. From 0.95 on they send all, so
    # the sum is (16, 5, 1): 0.95 x 22 = 20.9 takes two directions, 0.96 x 22 = 21.12 three.
    x = [torch.tensor([[4.0, 0, 0], [0, 1.0, 0]]), torch.tensor([[0, 2.0, 0], [0, 0, 1.0]])]
    model = _handle(toy.net(nn.Linear(3, 3)), (3,))
    basis = _collected(FedProTIP(threshold=threshold), model, x)["basis"]["0"]
    expected = np.diag([1.0] * rank + [0.0] * (3 - rank))
    np.testing.assert_allclose((basis @ basis.T).numpy(), expected, atol=1e-9)


def test_rounding_of_the_sum_of_many_clients_is_no_direction():
    """Energies 1 and 1e-6: the rounding errors of a float32 sum are up to 1.2e-7 of one client, 4.5e-6 of 1,400."""
    model, strategy = _handle(toy.net(nn.Linear(3, 3)), (3,)), FedProTIP(threshold=1.0)
    server = {"params": model.params, **strategy.init_server(model.params, model)}
    sums = {"core/0": pack(torch.tensor([1.0, 1e-6, 0.0]).diag()), "energy/0": torch.tensor([1.000001]).double()}
    for expected, rank in ((1.0, 2), (1400.0, 1)):
        info = replace(toy.consolidation(model), expected=expected)
        assert strategy.absorb(server, {"work": sums}, info, 1.0)["basis"]["0"].shape == (3, rank)


def test_the_loss_is_that_over_the_classes_of_the_task():
    model = cfl.Model(toy.mlp(4, 5, 2), (4,), (2, 2, 2), multi_head=True, growing=True)
    logits, y = toy.random(5, 4), torch.tensor([2, 3, 3, 2, 0])
    mask = torch.tensor([1.0, 1, 1, 1, 0]).double()  # the last one is padding, of another class
    ctx = toy.context({}, {}, Batch(toy.random(5, 4), y, mask, torch.arange(5)), model, 1)
    expected = F.cross_entropy(logits[:4, 2:], y[:4] - 2)
    torch.testing.assert_close(FedProTIP().loss(logits, ctx), expected)


# --- brute force -----------------------------------------------------------------------------------------------------


def _core(x, threshold):
    """V S^2 V^T of the fewest leading singular vectors that hold the share `threshold` of |X|^2."""
    u, s, _ = np.linalg.svd(x)
    rank = int(np.argmax(np.cumsum(s**2) >= threshold * np.sum(s**2))) + 1
    return (u[:, :rank] * s[:rank] ** 2) @ u[:, :rank].T


def test_bases_by_brute_force():
    model = _handle(toy.mlp(12, 10, 3), (12,))
    scale = torch.arange(1, 13) ** -0.5
    data = [[toy.random(n, 12, seed=10 * task + n) * scale.roll(task) for n in (40, 25)] for task in range(2)]
    server, before = None, {layer.name: np.zeros((layer.size, 0)) for layer in model.layers}
    for task, clients in enumerate(data):
        known = server["basis"] if server else {}
        server = _collected(FedProTIP(threshold=0.8, threshold_step=0.05), model, clients, server, task)
        threshold = 0.8 + 0.05 * task
        for name, own in before.items():
            inputs = [_inputs(model, x.float().double())[name] for x in clients]
            whole = threshold * sum(np.sum(x**2) for x in inputs)
            total = sum(_core(x, threshold) for x in inputs)
            outside = np.eye(len(own)) - own @ own.T
            values, vectors = np.linalg.eigh(outside @ total @ outside)
            reached = np.trace(own.T @ total @ own) + np.cumsum(np.concatenate([[0.0], values[::-1]]))
            rank = int(np.argmax(reached >= whole - 1e-9))
            before[name] = np.concatenate([own, vectors[:, ::-1][:, :rank]], axis=1)
            ours = server["basis"][name].numpy()
            assert 0 < ours.shape[1] == before[name].shape[1] < len(own) and (rank > 0 or task)
            np.testing.assert_allclose(ours @ ours.T, before[name] @ before[name].T, atol=1e-8)
            np.testing.assert_allclose(ours.T @ ours, np.eye(ours.shape[1]), atol=1e-12)
            held = sum(np.sum((ours.T @ x) ** 2) for x in inputs)
            assert held >= whole - 1e-9  # of the inputs themselves, not of what was sent
            if name in known:
                assert torch.equal(server["basis"][name][:, : known[name].shape[1]], known[name])


def test_a_client_looks_at_no_more_samples_than_asked_for():
    model, x = _handle(toy.mlp(12, 3), (12,)), toy.random(9, 12)
    for samples, rank in ((0, 9), (4, 4), (30, 9)):  # nine inputs in general position
        assert _collected(FedProTIP(threshold=1.0, samples=samples), model, [x])["basis"]["0"].shape == (12, rank)


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["mlp", "conv"])
def test_no_step_changes_the_outputs_for_earlier_inputs(kind):
    # With weight decay 0, biases frozen and a basis of all earlier inputs, no layer's output for them changes.
    if kind == "mlp":
        module, shape, count = toy.mlp(32, 32, 3), (32,), 6
    else:  # three images of four patches: 12 vectors of 32 values in each group
        module, shape, count = toy.net(nn.Conv2d(4, 6, 4, stride=4, groups=2), nn.ReLU(), nn.Flatten(),
                                       nn.Linear(24, 3)), (4, 8, 8), 3  # fmt: skip
    model, strategy = _handle(module, shape), FedProTIP(threshold=1.0)
    old, new = toy.random(count, *shape).float().double(), toy.random(8, *shape, seed=1)
    server = _collected(strategy, model, [old])
    shared = {"params": model.params, "basis": server["basis"]}
    batch = Batch(new, torch.arange(8) % 3, torch.ones(8, dtype=torch.float64), torch.arange(8))
    first, change = model.logits(model.params, old, 0), {}
    for name, frozen in (("frozen", strategy.frozen(1, model)), ("free", frozenset())):
        step = LocalStep(model, 1, frozen, ComposedMethod({"strategy": strategy}), optim.sgd(0.0))
        local = step.start(model.params)
        for index in range(5):
            local, _ = step(local, StepInputs(shared, batch, state={}, lr=0.2, step=index))
        params = {**model.params, **local.params}
        assert (model.logits(params, new, 0) - model.logits(model.params, new, 0)).abs().max() > 0.1
        change[name] = float((model.logits(params, old, 0) - first).abs().max())
    assert change["frozen"] < 1e-10
    assert change["free"] > 1e-3  # free biases break the guarantee, so the test can fail


def _run(*options, tasks=2, module=None, strategy=None, **more):
    config = toy.config(f"tasks={tasks}", "local.lr=0.2", *options, method="fedprotip")
    return cfl.run(config, stream=toy.stream(tasks, **more), strategy=strategy, model=module)


@pytest.mark.parametrize("scenario", ["task", "class", "domain"])
def test_biases_norms_and_old_heads_stay_after_the_first_task(scenario):
    module = toy.net(nn.Linear(8, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    recorder = toy.recording(FedProTIP)()
    options = (f"scenario={scenario}", "local.weight_decay=0.1")
    result = _run(*options, module=module, strategy=recorder, multi_head=scenario != "domain")
    end = next(after["params"] for info, _, after in recorder.rounds if info.phase.name == "features")
    still = {name for name, leaf in result.params.items() if torch.equal(leaf, end[name])}
    head = {"3.bias"} if scenario == "domain" else {"3.weight@0", "3.bias@0"}
    assert still == {"0.bias", "1.weight", "1.bias"} | head


def test_one_task_is_fedavg_to_the_bit():
    for own in ({}, {"multi_head": True}):
        ours = _run(tasks=1, **own)
        theirs = cfl.run(toy.config("tasks=1", "local.lr=0.2", method="fedavg"), stream=toy.stream(1, **own))
        assert all(torch.equal(ours.params[name], leaf) for name, leaf in theirs.params.items())


def test_the_loss_is_the_same_with_either_class_loss():
    seen, current = (_run("scenario=class", f"class_loss={kind}", multi_head=True) for kind in ("seen", "current"))
    assert all(torch.equal(seen.params[name], leaf) for name, leaf in current.params.items())


def test_bytes_from_the_shapes():
    # Four clients; layers with 8 and 6 inputs, and 6 features. A symmetric (d, d) has d (d + 1) / 2 numbers of 4 bytes.
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    bases, features = 4 * (8 * 9 // 2 + 6 * 7 // 2) + 2 * 8, 4 * (6 * 7 // 2 + 1)
    for scenario, per_client in (("task", bases), ("class", bases + 2 * features)):
        found = _run(f"scenario={scenario}", module=module, multi_head=True).metrics["bytes_by_phase"]
        assert found["features"]["up"] == 4 * per_client


def test_a_norm_bound_scales_core_and_energy_alike():
    """The energy is at least the trace of the core; caps of their own would make it smaller, and bases narrower."""
    model = cfl.Model(toy.mlp(8, 6, 2), (8,), [2], multi_head=False)
    here = toy.consolidation(model, clients=(0, 1, 2))
    narrow, wide = torch.ones(8, 8, dtype=torch.float64), torch.eye(8, dtype=torch.float64)
    uploads = {
        "core/1": torch.stack([pack(narrow), pack(narrow), pack(9 * wide)]),  # energies 8, 8, 72
        "energy/1": torch.tensor([[8.0], [8.0], [72.0]], dtype=torch.float64),
    }
    weights = {"": torch.ones(3, dtype=torch.float64)}
    sums = capped({"work": uploads, "weights": weights}, NormBound(), FedProTIP(), here)
    assert float(sums["energy/1"]) == pytest.approx(24)
    assert float(unpack(sums["core/1"]).trace()) == pytest.approx(24)
