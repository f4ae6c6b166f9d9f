"""GPM+FL: bases and updates against brute force, FOT as the limit of one client, and its failure with many."""

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import nn

import cfl
from cfl.contract import EMPTY, Batch, Client, Share, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import optim, tree
from cfl.engines.step import LocalStep, StepInputs
from cfl.methods.strategies.fot import FOT
from cfl.methods.strategies.gpm import GPM
from cfl.methods.subspace.projection import input_vectors, names, width
from cfl.streams.partition import deal
from tests import toy

# --- helpers ---------------------------------------------------------------------------------------------------------


def _handle(module, input_shape, outputs=3, **options):
    return cfl.Model(module, input_shape, [outputs] * 3, **{"multi_head": False, **options})


def _client(x, task=0, id=0):
    """A client with data x of one task."""
    y = torch.zeros(len(x), dtype=torch.int64)
    samples = cfl.from_tensors([(x, y, x[:1], y[:1])]).tasks[0].train
    return Client(id, {task: Share(samples, torch.arange(len(x)))}, task, (task,))


def _consolidated(strategy, model, *data, state=None):
    """The client's state after consolidating one task after another."""
    state = state or {}
    for task, x in enumerate(data):
        up, state = strategy.work(model.params, _client(x, task), {}, state, toy.consolidation(model, task))
        assert up == {}
    return state


def _ranks(state):
    return {name: basis.shape[1] for name, basis in tree.part(state, "basis").items()}


def _inputs(model, x, layer, augment=True):
    """X (d, n) of a layer of an MLP, by running the modules before it."""
    with torch.no_grad():
        for part in list(model.module)[: int(layer.path)]:
            x = part(x)
    return input_vectors(x[:, None, :], layer, augment)[:, 0].T.numpy()


def _projector(basis):
    return (basis @ basis.T).numpy()


def _joint(leaves, layer):
    """A layer's weight and bias (outputs, d + 1) in float64, as the augmented bias sees them."""
    outputs = layer.rows.stop - layer.rows.start
    return torch.cat([leaves[name][layer.rows].reshape(outputs, -1) for name in names(layer, True)], dim=1).double()


@dataclass(frozen=True)
class Recorder(GPM):
    """GPM that keeps (task, state, upload) of each `finish`, (task, state) of each `work`, and the server's steps."""

    uploads: list = field(default_factory=list)
    stored: list = field(default_factory=list)
    rounds: list = field(default_factory=list)

    def finish(self, params, ctx, steps):
        upload, state = super().finish(params, ctx, steps)
        self.uploads.append((ctx.task, state, upload))
        return upload, state

    def work(self, params, client, shared, state, info):
        up, new = super().work(params, client, shared, state, info)
        self.stored.append((info.task, client.id, new))
        return up, new

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        self.rounds.append((info, server["params"], new["params"]))
        return new


def _run(*overrides, method="gpm", strategy=None, model=None, stream=None, **options):
    config = toy.config("local.lr=0.2", *overrides, method=method, **options)
    return cfl.run(config, stream=stream or toy.stream(), strategy=strategy, model=model)


ONE = ("partition.clients=1", "cohort=1")


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_an_update_by_hand():
    # The step (2, 1), 4 for the bias, has the component 4.4 along (0.6, 0, 0.8); (-0.64, 1) and 0.48 remain.
    model = _handle(toy.net(nn.Linear(2, 1)), (2,), outputs=1)
    old = {"0.weight": torch.tensor([[1.0, 1.0]]).double(), "0.bias": torch.tensor([1.0]).double()}
    new = {"0.weight": torch.tensor([[3.0, 2.0]]).double(), "0.bias": torch.tensor([5.0]).double()}
    state = {"basis/0": torch.tensor([[0.6], [0.0], [0.8]]).double()}
    ctx = toy.context({"params": old}, state, EMPTY, model)
    upload, after = GPM().finish(new, ctx, 1)
    assert upload["0.weight"][0].tolist() == pytest.approx([0.64, -1.0]) and after is state
    assert upload["0.bias"].tolist() == pytest.approx([-0.48])
    # Free biases keep their step, and inputs have no constant: outside of (0.6, 0.8) remains (0.8, -0.6) x 1.
    free = {"basis/0": torch.tensor([[0.6], [0.8]]).double()}
    upload, _ = GPM(bias="free").finish(new, ctx._replace(state=free), 1)
    assert upload["0.weight"][0].tolist() == pytest.approx([-0.8, 0.6]) and upload["0.bias"].tolist() == [-4.0]
    # The same for a gradient. apply=update leaves gradients unchanged, and apply=gradient leaves updates unchanged.
    step = tree.sub(new, old)
    gradient = GPM(apply="gradient").adjust(step, old, ctx)
    assert gradient["0.weight"][0].tolist() == pytest.approx([-0.64, 1.0])
    assert GPM().adjust(step, old, ctx) is step
    assert GPM(apply="gradient").finish(new, ctx, 1)[0]["0.weight"].tolist() == [[-2.0, -1.0]]


@pytest.mark.parametrize("threshold,rank", [(0.5, 1), (0.9, 1), (0.91, 2), (1.0, 2)])
def test_a_basis_by_hand(threshold, rank):
    # Inputs (3, 0) and (0, 1): |X|^2 = 10, of which the first direction holds 9.
    model = _handle(toy.net(nn.Linear(2, 3)), (2,))
    state = _consolidated(GPM(threshold=threshold, bias="free"), model, torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    np.testing.assert_allclose(state["basis/0"].abs().numpy(), np.eye(2)[:, :rank], atol=1e-12)


@pytest.mark.parametrize("augment", [True, False])
def test_bases_are_those_of_equations_8_and_9_by_brute_force(augment):
    model = _handle(toy.mlp(12, 10, 3), (12,))
    data = [toy.random(40, 12) * torch.arange(1, 13) ** -0.5, 2 * toy.random(40, 12, seed=1)]
    strategy = GPM(threshold=0.9, bias="augment" if augment else "free")
    first = _consolidated(strategy, model, data[0])
    both = _consolidated(strategy, model, *data)
    for layer in model.layers:
        basis = np.zeros((width(layer, augment), 0))
        for inputs, state in zip(data, (first, both), strict=True):
            x = _inputs(model, inputs.float().double(), layer, augment)
            residual = x - basis @ (basis.T @ x)  # eq. 8
            u, s, _ = np.linalg.svd(residual)
            covered = 1 - np.sum(residual**2) / np.sum(x**2)
            shares = covered + np.concatenate([[0], np.cumsum(s**2)]) / np.sum(x**2)  # eq. 9
            rank = int(np.argmax(shares >= 0.9))
            assert 0 < rank < len(s)
            basis = np.concatenate([basis, u[:, :rank]], axis=1)
            ours = state[f"basis/{layer.name}"]
            assert ours.shape == basis.shape
            np.testing.assert_allclose(_projector(ours), basis @ basis.T, atol=1e-9)
        old = first[f"basis/{layer.name}"]
        assert torch.equal(both[f"basis/{layer.name}"][:, : old.shape[1]], old)


# --- limits ----------------------------------------------------------------------------------------------------------


def test_the_basis_of_a_lone_client_spans_that_of_fot():
    model = _handle(toy.mlp(12, 10, 3), (12,))
    fot, gpm = FOT(sketch="gram", threshold=0.8), GPM(threshold=0.8)
    server, state = {"params": model.params, **fot.init_server(model.params, model)}, {}
    grown = []
    for task in range(3):
        x = toy.random(40, 12, seed=task) * torch.arange(1, 13) ** (task / 2 - 1)  # ever wider
        client, info = _client(x, task), toy.consolidation(model, task)
        shared = fot.broadcast(server, info)
        up, _ = fot.work(shared["params"], client, shared, {}, info)
        server = fot.absorb(server, {"work": up}, info, 1.0)
        before = _ranks(state)
        _, state = gpm.work(model.params, client, {}, state, info)
        for name, basis in tree.part(state, "basis").items():
            grown.append(basis.shape[1] > before.get(name, 0))
            assert basis.shape == server["basis"][name].shape and basis.shape[1] < basis.shape[0]
            np.testing.assert_allclose(_projector(basis), _projector(server["basis"][name]), atol=1e-10)
    assert grown.count(True) >= 5  # of two layers in three tasks


def test_a_run_with_one_client_is_fot():
    # In float64 the two differ only in the order of additions.
    shared = (*ONE, "strategy.threshold=0.8", "server.lr=1")
    gpm = _run(*shared, model=toy.mlp(8, 6, 6, 2))
    fot = _run(*shared, "strategy.sketch=gram", "strategy.project_at=client", method="fot", model=toy.mlp(8, 6, 6, 2))
    fedavg = _run(*ONE, method="fedavg", model=toy.mlp(8, 6, 6, 2))
    for name, leaf in fot.params.items():
        torch.testing.assert_close(gpm.params[name], leaf, atol=1e-10, rtol=0)
    assert any((fedavg.params[name] - leaf).abs().max() > 0.01 for name, leaf in fot.params.items())


@pytest.mark.parametrize("apply", ["update", "gradient"])
def test_the_first_task_is_fedavg_to_the_byte(apply):
    recorder = Recorder(apply=apply)
    _run("strategy.threshold=0.9", strategy=recorder)
    alone = _run("tasks=1", method="fedavg", stream=toy.stream(tasks=1))
    end = next(params for info, params, _ in recorder.rounds if info.phase.name == "consolidate")
    assert all(torch.equal(end[name], leaf) for name, leaf in alone.params.items())


@pytest.mark.parametrize("apply", ["update", "gradient"])
def test_clients_that_saw_no_earlier_task_train_as_fedavg_to_the_byte(apply):
    # Two of four clients own each of two tasks. Take a seed for which the two pairs have no client in common.
    def owners(seed, task):
        targets = torch.arange(48) % 2
        return set(deal(targets, task, name="iid", clients=4, task_share=0.5, seed=seed).owners)

    seed = next(seed for seed in range(100) if not owners(seed, 0) & owners(seed, 1))
    overrides = ("tasks=2", "partition.task_share=0.5")
    recorder = Recorder(apply=apply)
    ours = _run(*overrides, strategy=recorder, stream=toy.stream(2), seed=seed)
    theirs = _run(*overrides, method="fedavg", stream=toy.stream(2), seed=seed)
    assert {id for _, id, _ in recorder.stored} == owners(seed, 0)
    assert all(torch.equal(ours.params[name], leaf) for name, leaf in theirs.params.items())


def test_without_a_basis_every_leaf_goes_up_as_fedavg_sends_it():
    model = _handle(toy.mlp(6, 5, 3), (6,))
    moved = {name: leaf + toy.random(*leaf.shape) for name, leaf in model.params.items()}
    ctx = toy.context({"params": model.params}, {}, EMPTY, model)
    ours, theirs = GPM().finish(moved, ctx, 1)[0], Strategy().finish(moved, ctx, 1)[0]
    assert list(ours) == list(theirs) and all(torch.equal(ours[name], leaf) for name, leaf in theirs.items())
    assert all(ours is moved[name] for name, ours in GPM(apply="gradient").adjust(moved, moved, ctx).items())


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype,bound", [(torch.float64, 1e-13), (torch.float32, 1e-5)])
@pytest.mark.parametrize("options", [(), ("local.momentum=0.9", "local.weight_decay=0.1"), ("local.optimizer=adam",)])
def test_an_upload_is_orthogonal_to_the_clients_own_basis(options, dtype, bound):
    recorder = Recorder(threshold=0.8)
    model = _run(*options, "local.lr=0.1", strategy=recorder, model=toy.mlp(8, 6, 6, 2).to(dtype)).model
    checked = 0
    for task, state, upload in recorder.uploads:
        total = float(toy.flat(upload).norm())
        assert total > 1e-3  # it learns
        for layer in model.layers if task else ():
            basis = state[f"basis/{layer.name}"].double()
            assert basis.shape[1] > 0
            assert float((_joint(upload, layer) @ basis).norm()) < bound * total
            checked += 1
    assert checked == 2 * 2 * 3 * 3  # later tasks, rounds, clients, layers


def test_the_mean_of_the_uploads_is_orthogonal_to_no_ones_basis():
    # The failure described in FOT, appendix F.2: clients with different classes protect different subspaces.
    recorder, options = Recorder(threshold=0.9), ("tasks=2", "partition.name=shards", "partition.shards=1", "cohort=4")
    model = _run(*options, strategy=recorder, model=toy.mlp(8, 6, 6, 2), stream=toy.stream(2)).model
    layer = model.layers[0]
    bases = [state[f"basis/{layer.name}"] for _, _, state in recorder.stored]
    assert len(bases) == 4
    assert max(np.abs(_projector(a) - _projector(bases[0])).max() for a in bases[1:]) > 0.1
    later = [(before, after) for info, before, after in recorder.rounds if info.task == 1]
    assert len(later) == 2
    for before, after in later:
        step = _joint(tree.sub(after, before), layer)
        assert all(float((step @ basis).norm()) > 0.05 * float(step.norm()) for basis in bases)


def test_the_mean_of_two_uploads_by_hand():
    # Two clients protect e1 and e2; both want the step (1, 1). They send (0, 1) and (1, 0): the mean is (1, 1) / 2.
    model = _handle(toy.net(nn.Linear(2, 1, bias=False)), (2,), outputs=1)
    new = {"0.weight": model.params["0.weight"] + 1}
    uploads = []
    for basis in ([[1.0], [0.0]], [[0.0], [1.0]]):
        ctx = toy.context({"params": model.params}, {"basis/0": torch.tensor(basis).double()}, EMPTY, model)
        uploads.append(GPM().finish(new, ctx, 1)[0])
    mean = tree.scale(tree.add(*uploads), 0.5)
    assert uploads[0]["0.weight"][0].tolist() == pytest.approx([0.0, -1.0])
    after = GPM().absorb({"params": model.params}, {"strategy": mean}, toy.consolidation(model, 1), 1.0)["params"]
    step = after["0.weight"] - model.params["0.weight"]
    assert step[0].tolist() == pytest.approx([0.5, 0.5])  # along e1, half of FedAvg's step


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_no_step_changes_the_outputs_for_stored_inputs_in_gradient_mode(kind, momentum):
    if kind == "mlp":
        module, shape, count = toy.mlp(32, 32, 32, 3), (32,), 6
    else:  # three images of four patches: 12 vectors of 2 x 16 values in each group
        conv = nn.Conv2d(4, 6, 4, stride=4, groups=2)
        module, shape, count = toy.net(conv, nn.ReLU(), nn.Flatten(), nn.Linear(24, 3)), (4, 8, 8), 3
    model = _handle(module, shape)
    old, new = toy.random(count, *shape), toy.random(8, *shape, seed=1)
    y = torch.arange(8) % 3
    batch = Batch(new, y, torch.ones(8, dtype=torch.float64), torch.arange(8))
    first, change = model.logits(model.params, old, 0), {}  # SGD: weight decay and Adam come after the projection
    for bias in ("augment", "free"):
        strategy = GPM(threshold=1.0, apply="gradient", bias=bias)
        state = {f"strategy/{name}": leaf for name, leaf in _consolidated(strategy, model, old).items()}
        assert state
        step = LocalStep(model, 1, frozenset(), ComposedMethod({"strategy": strategy}), optim.sgd(momentum))
        local, changes = step.start(model.params), []
        for index in range(5):
            local, _ = step(local, StepInputs({"params": model.params}, batch, state=state, lr=0.2, step=index))
            changes.append(float((model.logits(local.params, old, 0) - first).abs().max()))
        assert (model.logits(local.params, new, 0) - model.logits(model.params, new, 0)).abs().max() > 0.1
        change[bias] = max(changes)
    assert change["augment"] < 1e-10
    assert change["free"] > 1e-3  # free biases break the guarantee, so the test can fail


@pytest.mark.parametrize("apply", ["update", "gradient"])
def test_a_lone_client_keeps_its_logits_through_a_later_task(apply):
    tasks = [(x := toy.random(6, 32, seed=task), torch.arange(6) % 3, x, torch.arange(6) % 3) for task in range(2)]
    recorder = Recorder(threshold=1.0, apply=apply)
    options = (*ONE, "tasks=2", "rounds=4")
    result = _run(*options, strategy=recorder, model=toy.mlp(32, 32, 3), stream=cfl.from_tensors(tasks))
    end = next(params for info, params, _ in recorder.rounds if info.phase.name == "consolidate")
    changes = [
        float((result.model.logits(result.params, x, 0) - result.model.logits(end, x, 0)).abs().max())
        for x, *_ in tasks
    ]
    assert changes[0] < 1e-10 and changes[1] > 0.1


def test_the_bug_of_the_code_takes_one_direction_fewer_in_the_first_task_alone():
    model = _handle(toy.mlp(12, 10, 3), (12,))
    data = [toy.random(40, 12), toy.random(40, 12, seed=1)]
    bug = GPM(threshold=0.8, first_rank_bug=True)
    right, ours = _consolidated(GPM(threshold=0.8), model, data[0]), _consolidated(bug, model, data[0])
    for name, rank in _ranks(right).items():
        assert _ranks(ours)[name] == rank - 1 > 0
        inside, outer = ours[f"basis/{name}"], right[f"basis/{name}"]
        torch.testing.assert_close(outer @ (outer.T @ inside), inside, atol=1e-9, rtol=0)
    for state in (right, ours):  # from the same bases, both rules agree
        second, info = _client(data[1], 1), toy.consolidation(model, 1)
        after = [rule.work(model.params, second, {}, state, info)[1] for rule in (bug, GPM(threshold=0.8))]
        assert all(torch.equal(after[0][name], leaf) for name, leaf in after[1].items())
    # With the bug, one direction with all energy leaves zero directions, and so do inputs without energy.
    assert set(_ranks(_consolidated(bug, model, data[0][:1])).values()) == {0}
    free = GPM(threshold=0.8, first_rank_bug=True, bias="free")
    assert set(_ranks(_consolidated(free, model, torch.zeros(40, 12, dtype=torch.float64))).values()) == {0}


def test_a_client_looks_at_no_more_samples_than_asked_for():
    model, x = _handle(toy.mlp(12, 10, 3), (12,)), toy.random(9, 12)
    for samples, rank in ((0, 9), (4, 4), (30, 9)):  # nine inputs in general position, of 13 dimensions
        state = _consolidated(GPM(threshold=1.0, samples=samples), model, x)
        assert state["basis/0"].shape == (13, rank)
    few = GPM(threshold=1.0, samples=4)
    basis = _consolidated(few, model, x)["basis/0"]
    inputs = torch.nn.functional.pad(x, (0, 1), value=1.0)
    outside = (inputs - inputs @ basis @ basis.T).norm(dim=1)
    assert int((outside < 1e-9).sum()) == 4  # four of its own samples, each once
    assert torch.equal(few.work(model.params, _client(x), {}, {}, toy.consolidation(model))[1]["basis/0"], basis)
    for id, key in ((0, 12), (1, 11)):  # the draw is keyed by round and client
        _, other = few.work(model.params, _client(x, id=id), {}, {}, toy.consolidation(model, key=key))
        assert np.abs(_projector(other["basis/0"]) - _projector(basis)).max() > 0.01


def test_the_threshold_rises_by_its_step_after_each_task():
    model, x = _handle(toy.mlp(12, 3), (12,)), toy.random(40, 12)
    rising = GPM(threshold=0.7, threshold_step=0.05)
    for task, threshold in ((0, 0.7), (2, 0.8), (9, 1.0)):  # 0.7 + 9 x 0.05 is more than 1
        _, ours = rising.work(model.params, _client(x, task), {}, {}, toy.consolidation(model, task))
        fixed = _consolidated(GPM(threshold=threshold), model, x)
        assert _ranks(ours) == _ranks(fixed)


def test_nothing_is_added_where_the_inputs_are_covered():
    model, x = _handle(toy.mlp(12, 10, 3), (12,)), toy.random(40, 12)
    for threshold, data in ((0.8, x), (1.0, x[:6])):
        once = _consolidated(GPM(threshold=threshold), model, data)
        twice = _consolidated(GPM(threshold=threshold), model, data, data)
        assert all(torch.equal(twice[name], leaf) and leaf.shape[1] < leaf.shape[0] for name, leaf in once.items())


def test_rounding_errors_of_float32_are_no_directions():
    # The second task has 20 covered inputs and a new one, weak but far above rounding: one direction, as in FOT. That
    # the stored basis is rounded to float32 leaves 1e-7 of the others beside it, which are not rank.
    model = _handle(toy.net(nn.Linear(64, 3, bias=False)).float(), (64,))
    x, new = toy.random(20, 64), 0.001 * toy.random(1, 64, seed=1)
    state = _consolidated(GPM(threshold=1.0), model, x, torch.cat([x, new]))
    assert _ranks(state) == {"0": 21}


def test_a_dead_layer_gets_no_directions():
    model = _handle(toy.mlp(12, 10, 3), (12,))
    model.params["0.bias"].fill_(-100.0)  # ReLU outputs zeros for all samples
    state = _consolidated(GPM(bias="free"), model, toy.random(20, 12), toy.random(20, 12, seed=1))
    assert state["basis/2"].shape == (10, 0) and state["basis/0"].shape[1] > 0


def test_a_full_basis_stops_its_layer_and_grows_no_more():
    model = _handle(toy.mlp(5, 4, 3), (5,), multi_head=True)
    x = toy.random(80, 5)
    strategy = GPM(threshold=1.0, bias="free")
    state = _consolidated(strategy, model, x)
    assert state["basis/0"].shape == (5, 5)
    again = _consolidated(strategy, model, toy.random(80, 5, seed=1), state=state)
    assert torch.equal(again["basis/0"], state["basis/0"])
    # Heads of single tasks are not projected: only the body has a basis, and only its weight is unchanged.
    assert set(state) == {"basis/0"}
    params = {name: model.params[name] for name in model.trainable(1)}
    moved = {name: leaf + toy.random(*leaf.shape) for name, leaf in params.items()}
    ctx = toy.context({"params": model.params}, state, EMPTY, model, 1)
    plain = tree.sub(params, moved)
    for ours in (strategy.finish(moved, ctx, 1)[0], GPM(apply="gradient", bias="free").adjust(plain, params, ctx)):
        assert torch.equal(ours["0.weight"], torch.zeros(4, 5).double())
        assert all(torch.equal(ours[name], leaf) for name, leaf in plain.items() if name != "0.weight")


@pytest.mark.parametrize(
    "options,still",
    [
        ({}, {"1.weight", "1.bias"}),
        ({"norm_affine": "free"}, set()),
        ({"norm_affine": "free", "bias": "freeze"}, {"0.bias", "3.bias"}),
        ({"bias": "freeze"}, {"1.weight", "1.bias", "0.bias", "3.bias"}),
        ({"norm_affine": "free", "bias": "free"}, set()),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "still",
)
def test_what_is_frozen_after_the_first_task_stays_to_the_byte(options, still):
    recorder = Recorder(**options)
    module = toy.net(nn.Linear(8, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 2))
    result = _run("tasks=2", "local.weight_decay=0.1", strategy=recorder, model=module, stream=toy.stream(2))
    assert recorder.frozen(0, result.model) == frozenset() and recorder.frozen(1, result.model) == still
    end = next(params for info, params, _ in recorder.rounds if info.phase.name == "consolidate")
    assert {name for name, leaf in result.params.items() if torch.equal(leaf, end[name])} == still
    augmented = recorder.bias == "augment"
    bases = tree.part(recorder.stored[0][2], "basis").values()
    assert {len(basis) for basis in bases} == {8 + augmented, 6 + augmented}


# --- conformance -----------------------------------------------------------------------------------------------------


def test_plans_train_and_consolidate_all_tasks_but_the_last():
    plans = [[(p.name, p.rounds, p.cohort, p.train, p.work) for p in GPM().plan(task, 2, 7)] for task in (0, 1)]
    train = ("train", 7, "sampled", True, False)
    assert plans == [[train, ("consolidate", 1, "available", False, True)], [train]]


def test_a_cohort_alone_extends_its_bases_if_asked():
    recorder = Recorder(threshold=0.9, participants="sampled")
    _run("partition.clients=4", "cohort=2", "rounds=1", "tasks=3", strategy=recorder)
    by_task = {task: {id for own, id, _ in recorder.stored if own == task} for task in (0, 1)}
    assert [len(ids) for ids in by_task.values()] == [2, 2]
    plan = GPM(participants="sampled").plan(0, 2, 7)
    assert [(phase.name, phase.cohort) for phase in plan] == [("train", "sampled"), ("consolidate", "sampled")]


def test_bytes_from_the_shapes_of_the_bases():
    recorder = Recorder(threshold=0.9)
    metrics = _run("partition.task_share=0.75", strategy=recorder).metrics  # three of four clients own a task
    parameters = 8 * 6 + 6 + 6 * 6 + 6 + 6 * 2 + 2  # in float32
    assert metrics["bytes_by_phase"]["consolidate"] == {"up": 0, "down": 2 * 3 * 4 * parameters}
    assert metrics["bytes_by_phase"]["train"]["down"] == 3 * 2 * 3 * 4 * parameters
    last = {id: state for _, id, state in recorder.stored}  # after the last task of each client
    stored = [4 * sum(basis.shape[0] * basis.shape[1] for basis in state.values()) for state in last.values()]
    assert min(stored) > 0 and {basis.shape[0] for state in last.values() for basis in state.values()} == {9, 7}
    assert metrics["client_bytes"] == pytest.approx(sum(stored) / 4)
    assert metrics["client_bytes_max"] == max(stored)


@pytest.mark.parametrize("apply", ["update", "gradient"])
def test_heads_are_not_projected(apply):
    recorder = Recorder(threshold=0.9, apply=apply)
    result = _run(strategy=recorder, stream=toy.stream(multi_head=True))
    assert {name for *_, state in recorder.stored for name in state} == {"basis/1", "basis/3"}
    ends = {info.task: after for info, _, after in recorder.rounds}
    for task in range(3):
        for name in result.model.head(task):
            assert torch.equal(result.params[name], ends[task][name])  # later tasks do not change it
            assert not torch.equal(result.params[name], result.model.params[name])


@pytest.mark.parametrize("apply", ["update", "gradient"])
def test_hooks_write_to_nothing_that_they_are_given(apply):
    model, x = _handle(toy.mlp(6, 5, 3), (6,)), toy.random(4, 6)
    strategy = GPM(threshold=0.8, apply=apply)
    state = _consolidated(strategy, model, x)
    params = {name: leaf + toy.random(*leaf.shape) for name, leaf in model.params.items()}
    given = [model.params, params, state]
    copies = [tree.clone(leaves) for leaves in given]
    ctx = toy.context({"params": model.params}, state, EMPTY, model)
    strategy.adjust(params, params, ctx)
    strategy.finish(params, ctx, 1)
    strategy.work(params, _client(toy.random(4, 6, seed=1), 1), {}, state, toy.consolidation(model, 1))
    for leaves, copy in zip(given, copies, strict=True):
        assert list(leaves) == list(copy) and all(torch.equal(leaves[name], leaf) for name, leaf in copy.items())


@pytest.mark.parametrize("apply", ["update", "gradient"])
def test_hooks_work_on_stacked_clients(apply):
    model, strategy = _handle(toy.mlp(6, 5, 3), (6,)), GPM(threshold=1.0, apply=apply)
    states = [_consolidated(strategy, model, toy.random(3, 6, seed=seed)) for seed in range(2)]  # ranks 3: states stack
    params = [
        {name: leaf + toy.random(*leaf.shape, seed=seed) for name, leaf in model.params.items()} for seed in (5, 6)
    ]

    def hooks(at, state):
        ctx = toy.context({"params": model.params}, state, EMPTY, model)
        return strategy.finish(strategy.adjust(at, at, ctx), ctx, 1)[0]

    stacked = toy.unstacked(torch.func.vmap(hooks)(tree.stack(params), tree.stack(states)))
    for ours, at, state in zip(stacked, params, states, strict=True):
        for name, leaf in hooks(at, state).items():
            torch.testing.assert_close(ours[name], leaf, atol=1e-12, rtol=0)
