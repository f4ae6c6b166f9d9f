"""RGO+FL: the recursion against a dense inverse, brute-force gradients, its effect on steps, and who stores P."""

import copy
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from torch import nn

import cfl
from cfl.contract import EMPTY, Client, Phase, Share
from cfl.core import rng, tree
from cfl.methods.strategies.rgo import RGO
from cfl.testing import check_strategy, toy_config
from tests import toy

# --- helpers ---------------------------------------------------------------------------------------------------------


def _conv():
    """A convolution, one of two groups, dropout (off while P is updated) and a Linear layer, on (2, 4, 4) images."""
    first, second = nn.Conv2d(2, 4, 2), nn.Conv2d(4, 6, 2, groups=2)
    return toy.net(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(24, 3))


def _handle(module, input_shape, outputs=3, multi_head=False, seed=0):
    return cfl.Model(module, input_shape, [outputs] * 3, multi_head=multi_head, seed=seed)


def _client(x, y, task=0, id=0):
    samples = cfl.from_tensors([(x, y, x[:1], y[:1])]).tasks[0].train
    return Client(id, {task: Share(samples, torch.arange(len(x)))}, task, (task,))


def _consolidated(strategy, model, *data):
    """The state of a client after consolidating one task (x, y) after another."""
    state = {}
    for task, (x, y) in enumerate(data):
        up, state = strategy.work(model.params, _client(x, y, task), {}, state, toy.consolidation(model, task))
        assert up == {}
    return state


def _vectors(model, x, y, size):
    """For each batch of `size`: matrix name to v, with the gradient of q taken by autograd on a copy of the module.

    Batches are those of client 0 in the round of `toy.consolidation`.
    """
    module = copy.deepcopy(model.module).eval()
    order = torch.randperm(len(x), generator=rng.generator(rng.key(11, "order", 0)))
    for at in range(0, len(x), size):
        xs, ys = x[order[at : at + size]], y[order[at : at + size]]
        z = module(xs)
        a = torch.exp(z - z.logsumexp(dim=1, keepdim=True))
        q = sum(z[b, label] * (a[b, label] - a[b, label] ** 2).sqrt().detach() for b, label in enumerate(ys.tolist()))
        grads = dict(zip(dict(module.named_parameters()), torch.autograd.grad(q, module.parameters()), strict=True))
        v = {}
        for layer in model.layers:
            weight = grads[layer.weight][layer.rows]
            v[f"weight/{layer.name}"] = weight.reshape(len(weight), -1).mean(dim=0)
            v[f"bias/{layer.name}"] = grads[layer.bias][layer.rows]
        yield v


@dataclass(frozen=True)
class Recorder(RGO):
    """RGO that keeps (task, client, state before, state after) of each `work`, and the server's rounds."""

    stored: list = field(default_factory=list)
    rounds: list = field(default_factory=list)

    def work(self, params, client, shared, state, info):
        up, new = super().work(params, client, shared, state, info)
        assert up == {}
        self.stored.append((info.task, client.id, state, new))
        return up, new

    def absorb(self, server, mean, info, lr):
        new = super().absorb(server, mean, info, lr)
        self.rounds.append((info, server["params"]))
        return new


def _run(*overrides, method="rgo", strategy=None, model=None, stream=None):
    config = toy.config("local.lr=0.2", *overrides, method=method)
    return cfl.run(config, stream=stream or toy.stream(), strategy=strategy, model=model)


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_an_update_of_p_by_hand():
    # W = 0, b = 0, two outputs, x = (2, 0), y = 0: a = 1/2 and the root is 1/2, so that dq/dW = [[1, 0], [0, 0]] and
    # dq/db = (1/2, 0). Weight: v = (1/2, 0), the mean over both outputs; bias: v = (1/2, 0). With alpha 1 either is
    # P = I - diag(1/4, 0) / (1 + 1/4) = diag(4/5, 1).
    model = _handle(toy.net(nn.Linear(2, 2)), (2,), outputs=2)
    model.params = tree.map(torch.zeros_like, model.params)
    x, y = torch.tensor([[2.0, 0.0]]), torch.tensor([0])
    state = _consolidated(RGO(alpha=1.0), model, (x, y))
    assert set(state) == {"weight/0", "bias/0"}
    for p in state.values():
        np.testing.assert_allclose(p.numpy(), np.diag([0.8, 1.0]), atol=1e-15)
    # With two such samples in one batch, q and v are doubled: 1 / (1 + 1) = 1/2. In two batches: 1 / (1 + 1/2).
    for size, left in ((2, 1 / 2), (1, 2 / 3)):
        state = _consolidated(RGO(alpha=1.0, batch_size=size), model, (x.expand(2, 2), y.expand(2)))
        np.testing.assert_allclose(state["weight/0"].numpy(), np.diag([left, 1.0]), atol=1e-15)


def test_a_gradient_by_hand():
    # P = diag(4/5, 1) has trace 9/5, so it is scaled by 10/9: (1, 1) becomes (8/9, 10/9).
    model = _handle(toy.net(nn.Linear(2, 2)), (2,), outputs=2)
    grads = {"0.weight": torch.tensor([[1.0, 1.0], [0.0, 9.0]]).double(), "0.bias": torch.tensor([9.0, 9.0]).double()}
    p = torch.diag(torch.tensor([0.8, 1.0])).double()
    ctx = toy.context({}, {"weight/0": p, "bias/0": p}, EMPTY, model)
    ours = RGO().adjust(grads, model.params, ctx)
    np.testing.assert_allclose(ours["0.weight"].numpy(), [[8 / 9, 10 / 9], [0.0, 10.0]], atol=1e-14)
    np.testing.assert_allclose(ours["0.bias"].numpy(), [8.0, 10.0], atol=1e-14)


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("alpha", [1.0, 0.01])
def test_p_is_the_inverse_of_its_definition(kind, alpha):
    # P = (I + sum v v^T / alpha)^-1, over all batches of both tasks.
    shape, module = ((7,), toy.mlp(7, 5, 3)) if kind == "mlp" else ((2, 4, 4), _conv())
    model = _handle(module, shape)
    data = [(toy.random(10, *shape, seed=task), (torch.arange(10) + task) % 3) for task in range(2)]
    state = _consolidated(RGO(alpha=alpha, batch_size=4), model, *data)
    vectors = [v for x, y in data for v in _vectors(model, x, y, 4)]
    assert len(vectors) == 2 * 3  # batches of 4, 4 and 2
    assert set(state) == set(vectors[0]) and len(state) == (4 if kind == "mlp" else 8)
    for name, p in state.items():
        h = torch.eye(len(p), dtype=torch.float64) + sum(torch.outer(v[name], v[name]) for v in vectors) / alpha
        torch.testing.assert_close(p, h.inverse(), atol=1e-12, rtol=0)
        assert (p - torch.eye(len(p))).abs().max() > 1e-4


def test_with_heads_of_their_own_only_the_bodys_layers_count():
    model = _handle(toy.mlp(7, 5, 3), (7,), multi_head=True)
    x, y = toy.random(6, 7), torch.arange(6) % 3
    state = RGO().work(model.params, _client(x, y, 1), {}, {}, toy.consolidation(model, 1))[1]
    assert set(state) == {"weight/0", "bias/0"}
    head = {"2.weight": model.params["2.weight@1"], "2.bias": model.params["2.bias@1"]}  # q goes through the task's own
    model.module.load_state_dict({**model.module.state_dict(), **head})
    (v,) = _vectors(_handle(model.module, (7,)), x, y, 16)
    for name, p in state.items():
        h = torch.eye(len(p), dtype=torch.float64) + torch.outer(v[name], v[name])
        torch.testing.assert_close(p, h.inverse(), atol=1e-12, rtol=0)
    grads = {name: torch.ones_like(model.params[name]) for name in model.trainable(1)}
    ours = RGO().adjust(grads, grads, toy.context({}, state, EMPTY, model, 1))
    assert list(ours) == list(grads)
    assert {name for name, leaf in ours.items() if leaf is grads[name]} == {"2.weight@1", "2.bias@1"}


def test_notes_name_what_is_not_multiplied():
    norm = nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    line = "not multiplied by P, trained as in FedAvg: 1.bias, 1.weight"
    for multi_head in (False, True):  # a head of its own for each task is not at issue
        assert RGO().notes(_handle(norm, (6,), multi_head=multi_head)) == [line]
    assert RGO().notes(_handle(_conv(), (2, 4, 4))) == []


# --- limits ----------------------------------------------------------------------------------------------------------


def test_the_first_task_is_fedavg_to_the_byte():
    recorder = Recorder(share=1.0)
    _run(strategy=recorder)
    alone = _run("tasks=1", method="fedavg", stream=toy.stream(tasks=1))
    end = next(params for info, params in recorder.rounds if info.phase.name == "consolidate")
    assert all(torch.equal(end[name], leaf) for name, leaf in alone.params.items())


def test_without_p_gradients_keep_their_very_tensors():
    model = _handle(_conv(), (2, 4, 4))
    ours = RGO().adjust(model.params, model.params, toy.context({}, {}, EMPTY, model))
    assert list(ours) == list(model.params) and all(ours[name] is leaf for name, leaf in model.params.items())


def test_without_a_layer_for_p_it_is_fedavg_and_says_so():
    with pytest.warns(UserWarning, match="no layer to multiply by P .* 'rgo' is FedAvg"):
        ours = toy.on_heads_alone("rgo")
    assert torch.equal(ours, toy.on_heads_alone("fedavg"))


def test_an_alpha_without_end_is_fedavg():
    # P differs from I by |v|^2 / alpha, and |v| is far below 100: gradients change by a fraction below 1e-8.
    def run(*overrides, method="rgo"):
        return _run(*overrides, method=method, model=toy.mlp(8, 6, 6, 2)).params

    fedavg = run(method="fedavg")
    far, near = (run("strategy.share=1", f"strategy.alpha={alpha}") for alpha in (1e12, 1.0))
    for name, leaf in fedavg.items():
        torch.testing.assert_close(far[name], leaf, atol=1e-8, rtol=0)
    assert max(float((near[name] - leaf).abs().max()) for name, leaf in fedavg.items()) > 1e-3


# --- properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("alpha", [1.0, 0.01])
def test_p_stays_symmetric_and_positive_definite(dtype, alpha):
    model = _handle(toy.mlp(64, 32, 3).to(dtype), (64,))
    data = [(3 * toy.random(200, 64, seed=task), torch.arange(200) % 3) for task in range(4)]
    for p in _consolidated(RGO(alpha=alpha, batch_size=4), model, *data).values():
        assert p.dtype == dtype and torch.equal(p, p.T)
        values = torch.linalg.eigvalsh(p.double())
        assert 0 < values[0] < 0.9 and values[-1] < 1 + 1e-6


def test_the_applied_matrix_has_the_trace_of_the_identity():
    # A gradient of I (d, d) of a square layer returns the matrix itself; gradients of its bias return one row each.
    model = _handle(toy.net(nn.Linear(4, 4)), (4,), outputs=4)
    state = _consolidated(RGO(alpha=0.1), model, (toy.random(20, 4), torch.arange(20) % 4))
    ctx = toy.context({}, state, EMPTY, model)
    eye = torch.eye(4, dtype=torch.float64)
    rows = [RGO().adjust({"0.weight": eye, "0.bias": row}, {}, ctx) for row in eye]
    for applied in (rows[0]["0.weight"], torch.stack([row["0.bias"] for row in rows])):
        assert float(applied.trace()) == pytest.approx(4.0, rel=1e-12)
        torch.testing.assert_close(applied, applied.T, atol=1e-12, rtol=0)
        assert (applied - eye).abs().max() > 0.1


def test_gradients_are_multiplied_group_by_group():
    model = _handle(_conv(), (2, 4, 4))
    state = _consolidated(RGO(alpha=0.1), model, (toy.random(20, 2, 4, 4), torch.arange(20) % 3))
    grads = {name: toy.random(*leaf.shape, seed=3) for name, leaf in model.params.items()}
    ours = RGO().adjust(grads, model.params, toy.context({}, state, EMPTY, model))
    assert list(ours) == list(grads)
    for group, rows in enumerate((slice(0, 3), slice(3, 6))):
        p = state[f"weight/2.group{group}"]
        expected = 8 / p.trace() * grads["2.weight"][rows].reshape(3, 8) @ p  # 2 channels x 2 x 2
        torch.testing.assert_close(ours["2.weight"][rows], expected.reshape(3, 2, 2, 2), atol=1e-13, rtol=0)
        p = state[f"bias/2.group{group}"]
        torch.testing.assert_close(ours["2.bias"][rows], 3 / p.trace() * p @ grads["2.bias"][rows], atol=1e-13, rtol=0)
    p = state["weight/0"]
    expected = (8 / p.trace() * grads["0.weight"].reshape(4, 8) @ p).reshape(4, 2, 2, 2)
    torch.testing.assert_close(ours["0.weight"], expected, atol=1e-13, rtol=0)
    assert all((ours[name] - leaf).abs().max() > 1e-3 for name, leaf in grads.items())


def test_steps_shrink_where_earlier_tasks_curve():
    # One vector v: P v = v / (1 + |v|^2 / alpha), and vectors orthogonal to v stay; then P is scaled to trace d.
    model = _handle(toy.net(nn.Linear(6, 3)), (6,))
    x, y = toy.random(5, 6), torch.arange(5) % 3
    state = _consolidated(RGO(alpha=0.1), model, (x, y))
    (v,) = (vectors["weight/0"] for vectors in _vectors(model, x, y, 16))
    left = 1 / (1 + float(v @ v) / 0.1)
    scale = 6 / (5 + left)
    across = torch.linalg.svd(v[None]).Vh[1]
    grads = {"0.weight": torch.stack([v, across, 0 * v]), "0.bias": torch.zeros(3).double()}
    ours = RGO().adjust(grads, {}, toy.context({}, state, EMPTY, model))["0.weight"]
    torch.testing.assert_close(ours, torch.stack([left * scale * v, scale * across, 0 * v]), atol=1e-12, rtol=0)
    assert left < 0.9 < 1 < scale


@pytest.mark.parametrize("share,count", [(0.4, 4), (0.26, 3), (1.0, 10), (0.01, 1)])
def test_a_share_of_the_owners_updates_p_and_the_others_keep_their_state(share, count):
    model, x, y = _handle(toy.mlp(7, 5, 3), (7,)), toy.random(4, 7), torch.arange(4) % 3
    owners = (0, 1, 3, 4, 6, 7, 8, 9, 12, 20)
    strategy, drawn = RGO(share=share), []
    earlier = {"weight/0": 0.5 * torch.eye(7).double()}
    for key in (11, 12):
        info = toy.consolidation(model, clients=owners, key=key)
        states = {id: strategy.work(model.params, _client(x, y, id=id), {}, earlier, info)[1] for id in owners}
        drawn.append({id for id, state in states.items() if state is not earlier})
        assert len(drawn[-1]) == count
        assert all(len(states[id]) == 4 for id in drawn[-1])
    if 1 < count < 10:
        assert drawn[0] != drawn[1]  # each round draws anew


@pytest.mark.parametrize("share,count", [(0.4, 1), (0.6, 2), (1.0, 3)])  # of three owners of each task
def test_in_a_run_as_many_clients_hold_p_as_the_share_says(share, count):
    recorder = Recorder(share=share)
    _run("partition.task_share=0.75", strategy=recorder)
    for task in (0, 1):
        rows = [row for row in recorder.stored if row[0] == task]
        assert len(rows) == 3
        changed = [after for _, _, before, after in rows if after is not before]
        assert len(changed) == count and all(set(after) == set(changed[0]) != set() for after in changed)
    assert all(not before for task, _, before, _ in recorder.stored if task == 0)
    assert {task for task, *_ in recorder.stored} == {0, 1}  # not after the last task


# --- feature encoding -------------------------------------------------------------------------------------------------

SEED = 3  # a seed whose orders are not their own inverses


class _Encoded(nn.Module):
    """A module that permutes its layers' outputs by the given orders, by path, before it adds biases."""

    def __init__(self, module, orders):
        super().__init__()
        self.module = copy.deepcopy(module)
        for path, order in orders.items():
            self.module.get_submodule(path).register_forward_hook(
                lambda layer, args, out, order=order: (out - self._bias(layer, out))[:, order] + self._bias(layer, out)
            )

    def _bias(self, layer, out):
        return layer.bias.view(-1, *[1] * (out.dim() - 2))

    def forward(self, x):
        return self.module(x)


def _orders(strategy, model, task):
    """Path of each encoded layer to the order of its outputs; at least one is not its own inverse."""
    orders = strategy.init_server(model.params, model)[f"orders/{task}"]
    assert any(not torch.equal(order, order.argsort()) for order in orders.values())
    return {name.removesuffix(".weight"): order for name, order in orders.items()}


@pytest.mark.parametrize("kind", ["mlp", "conv"])
@pytest.mark.parametrize("multi_head", [False, True])
def test_a_task_is_served_by_the_network_with_its_outputs_permuted(kind, multi_head):
    shape, module = ((7,), toy.mlp(7, 5, 4, 3)) if kind == "mlp" else ((2, 4, 4), _conv())
    model, x = _handle(module, shape, multi_head=multi_head, seed=SEED), toy.random(6, *shape)
    strategy = RGO(encode=True)
    server = {"params": model.params, **strategy.init_server(model.params, model)}
    assert strategy.serve(server, 0) == model.params
    for task in (1, 2):
        orders = _orders(strategy, model, task)
        assert list(orders) == ["0", "2"]  # all but the one that gives the logits
        heads = {name.partition("@")[0]: model.params[name] for name in model.head(task)}
        encoded = _Encoded(model.module, orders).double().eval()
        encoded.module.load_state_dict({**encoded.module.state_dict(), **heads})
        with torch.no_grad(), model.evaluation():
            found = model.logits(strategy.serve(server, task), x, task)
            torch.testing.assert_close(found, encoded(x), atol=1e-13, rtol=0)


def test_what_comes_down_is_in_the_tasks_order_and_the_server_keeps_the_first_tasks():
    model, strategy = _handle(toy.mlp(7, 5, 4, 3), (7,), seed=SEED), RGO(encode=True)
    assert _orders(strategy, model, 1)
    server = {"params": model.params, **strategy.init_server(model.params, model)}
    info = replace(toy.consolidation(model, 1), phase=Phase("train"))
    down = strategy.broadcast(server, info)["params"]
    served = strategy.serve(server, 1)
    assert all(torch.equal(down[name], leaf) for name, leaf in served.items())
    assert not torch.equal(down["0.weight"], model.params["0.weight"])
    step = {name: toy.random(*leaf.shape, seed=1) for name, leaf in down.items()}
    after = strategy.absorb(server, {"strategy": step}, info, 1.0)
    for name, leaf in strategy.serve(after, 1).items():
        assert torch.equal(leaf, down[name] - step[name])


def test_p_and_what_it_does_are_those_of_the_encoded_network():
    model, strategy, task = _handle(toy.mlp(7, 5, 4, 3), (7,), seed=SEED), RGO(encode=True, alpha=0.1), 1
    x, y = toy.random(10, 7), torch.arange(10) % 3
    server = {"params": model.params, **strategy.init_server(model.params, model)}
    info = toy.consolidation(model, task)
    state = strategy.work(strategy.broadcast(server, info)["params"], _client(x, y, task), {}, {}, info)[1]
    encoded = _handle(_Encoded(model.module, _orders(strategy, model, task)).double(), (7,))
    (vectors,) = _vectors(encoded, x, y, 16)
    for name, p in state.items():
        v = vectors[name.replace("/", "/module.")]
        h = torch.eye(len(p), dtype=torch.float64) + torch.outer(v, v) / 0.1
        torch.testing.assert_close(p, h.inverse(), atol=1e-12, rtol=0)


def test_encoding_is_by_the_seed_and_group_by_group():
    strategy, tasks = RGO(encode=True), (1, 2)
    models = [_handle(_conv(), (2, 4, 4), seed=seed) for seed in (0, 1)]
    found = [strategy.init_server(model.params, model) for model in models]
    orders = [torch.cat([*own[f"orders/{task}"].values()]).tolist() for own in found for task in tasks]
    assert len({tuple(own) for own in orders}) == len(orders) == 4
    for own in found:
        for task in tasks:
            grouped = own[f"orders/{task}"]["2.weight"]  # outputs 0 to 2, and 3 to 5
            assert sorted(grouped[:3].tolist()) == [0, 1, 2] and sorted(grouped[3:].tolist()) == [3, 4, 5]
    assert RGO().init_server(models[0].params, models[0]) == {}


@pytest.mark.slow
@pytest.mark.parametrize("more", [("tasks=2",), pytest.param((), marks=pytest.mark.slow)])
def test_encoding_keeps_the_rules_of_a_strategy(more):
    check_strategy(RGO(encode=True, share=1.0), config=toy_config(*more))


def test_encoding_is_none_in_the_first_task_and_another_network_after_it():
    plain, encoded = (_run("strategy.share=1", f"strategy.encode={flag}").metrics for flag in ("false", "true"))
    assert plain["accuracy_matrix"][0] == encoded["accuracy_matrix"][0]
    assert plain["accuracy_matrix"][1:] != encoded["accuracy_matrix"][1:]
    assert plain["bytes_by_phase"] == encoded["bytes_by_phase"]


# --- conformance -----------------------------------------------------------------------------------------------------


def test_bytes_from_the_shapes_of_p():
    # float32, 8-6-6-2: inputs 8, 6, 6 and biases 6, 6, 2. Uploads have only the model's updates.
    metrics = _run("strategy.share=1").metrics
    stored = 4 * (8 * 8 + 6 * 6 + 6 * 6 + 6 * 6 + 6 * 6 + 2 * 2)
    assert metrics["client_bytes"] == metrics["client_bytes_max"] == stored
    parameters = 8 * 6 + 6 + 6 * 6 + 6 + 6 * 2 + 2
    assert metrics["bytes_by_phase"]["consolidate"] == {"up": 0, "down": 2 * 4 * 4 * parameters}
    assert metrics["bytes_by_phase"]["train"]["up"] == 3 * 2 * 3 * 4 * parameters
    recorder = Recorder(share=0.5)
    metrics = _run("tasks=2", strategy=recorder, stream=toy.stream(2)).metrics
    assert metrics["client_bytes"] == stored * 2 / 4  # two of four clients


def test_hooks_write_to_nothing_that_they_are_given():
    model, data = _handle(_conv(), (2, 4, 4)), (toy.random(6, 2, 4, 4), torch.arange(6) % 3)
    state = _consolidated(RGO(), model, data)
    grads = {name: toy.random(*leaf.shape) for name, leaf in model.params.items()}
    given = [model.params, grads, state]
    copies = [tree.clone(leaves) for leaves in given]
    RGO().adjust(grads, model.params, toy.context({}, state, EMPTY, model))
    _, new = RGO().work(model.params, _client(*data, 1), {}, state, toy.consolidation(model, 1))
    assert all(not torch.equal(new[name], leaf) for name, leaf in state.items())
    for leaves, copied in zip(given, copies, strict=True):
        assert list(leaves) == list(copied) and all(torch.equal(leaves[name], leaf) for name, leaf in copied.items())


def test_gradients_of_stacked_clients_are_those_of_each():
    model = _handle(_conv(), (2, 4, 4))
    states = [_consolidated(RGO(), model, (toy.random(6, 2, 4, 4, seed=s), torch.arange(6) % 3)) for s in range(2)]
    grads = [{name: toy.random(*leaf.shape, seed=s) for name, leaf in model.params.items()} for s in (5, 6)]

    def adjust(grads, state):
        return RGO().adjust(grads, model.params, toy.context({}, state, EMPTY, model))

    stacked = toy.unstacked(torch.func.vmap(adjust)(tree.stack(grads), tree.stack(states)))
    for ours, *own in zip(stacked, grads, states, strict=True):
        for name, leaf in adjust(*own).items():
            torch.testing.assert_close(ours[name], leaf, atol=1e-13, rtol=0)
