"""LoRM: merged layers by hand and against least squares, which factor trains when, and FedAvg as the limit."""

import pytest
import torch

import cfl
from cfl.assembly import methods
from cfl.core import ConfigError
from cfl.methods.strategies.lorm import LoRM, merged_update
from cfl.methods.subspace.sketch import pack, unpack
from cfl.runtime.builder import build_session
from cfl.testing import check_strategy, toy_config
from tests import toy

ADAPTED = ("model.adapter=lora", "model.adapter_rank=3")
ALL = ("partition.clients=3", "cohort=3", "tasks=1", "rounds=1", "local.lr=0.3")


def one_round(*options, net=None):
    """A round of 3 clients: the session, its inputs before the round, and each client's weights after training."""
    config, local = toy.config(*ALL, *options, method="lorm"), {}
    session = build_session(config, toy.stream(1), methods.build(config), net or toy.mlp(8, 6, 6, 2))
    inputs = session.prepare(0)
    session.round(0, lambda info, client, params: local.update({client: params}))
    return session, inputs, local


def samples(client):
    return next(client.batches(1000)).x.double()


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_a_merge_by_hand():
    # d = 1: inputs with G_1 = 1 and G_2 = 4, weights 3 and 1, broadcast 0: W = (3 * 1 + 1 * 4) / (1 + 4) = 1.4.
    step = merged_update(torch.tensor([5.0]), torch.tensor([[1 * (0.0 - 3) + 4 * (0.0 - 1)]]))
    assert 0 - step.item() == pytest.approx(1.4)


def test_where_no_client_has_inputs_the_weight_stays():
    # All inputs are along the first axis; a weight along the second one has no say, and keeps its value: a step of 0.
    gram = torch.tensor([[2.0, 0.0], [0.0, 0.0]])
    assert merged_update(pack(gram), torch.tensor([[4.0], [0.0]])).tolist() == [[2.0, 0.0]]


def test_weak_inputs_of_a_wide_layer_count():
    """The merge of one client is its own layer: W - W_1 = 1 in each direction, of energy 1 to 1e-5."""
    energy = torch.logspace(0, -5, 600, dtype=torch.float64)
    step = merged_update(pack(energy.diag()), energy[:, None])
    assert torch.allclose(step, torch.ones(1, 600, dtype=torch.float64), atol=1e-9)


def test_rounding_of_the_sums_is_no_input():
    """Inputs in 3 of 8 dimensions: sums in float32 give the step of least norm, the part of W - W_i in their span."""
    x, w = toy.random(20, 3) @ toy.random(3, 8, seed=1), toy.random(8, 2, seed=2)
    step = merged_update(pack(x.T @ x).float(), (x.T @ x @ w).float())
    assert torch.allclose(step, (torch.linalg.pinv(x) @ x @ w).T, atol=1e-4)


def test_gamma_shrinks_the_off_diagonal_entries_of_both_sums():
    grams = {}
    for gamma in (1.0, 0.25):
        session, inputs, _ = one_round(f"strategy.gamma={gamma}")
        rule, model = LoRM(gamma=gamma), session.model
        with model.evaluation():
            params = {**inputs.shared["params"], "0.weight": inputs.shared["params"]["0.weight"] - 1.0}
            up, _ = rule.work(params, inputs.clients[0], inputs.shared, {}, inputs.info)
        x = samples(inputs.clients[0])
        gram = x.T @ x
        expected = gamma * gram + (1 - gamma) * gram.diag().diag()
        assert torch.allclose(up["gram/0"], pack(expected), atol=1e-10)
        assert torch.allclose(up["update/0"], expected.sum(1, keepdim=True).expand(8, 6), atol=1e-10)  # W - W_i = 1
        grams[gamma] = up["gram/0"]
    assert not torch.allclose(*grams.values())


def test_a_client_looks_at_no_more_samples_than_asked_for():
    session, inputs, local = one_round()
    client = inputs.clients[0]
    with session.model.evaluation():
        up, _ = LoRM(samples=3, gamma=1.0).work(local[client.id], client, inputs.shared, {}, inputs.info)
    assert torch.linalg.matrix_rank(unpack(up["gram/0"])) == 3  # of eight inputs each, in general position


# --- limit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [(), ADAPTED])
def test_a_single_client_keeps_its_own_layers(adapter):
    # W = W_1 G G^-1 = W_1 (of adapters: B alone moves in the first round), as the average of one client.
    alone = ("partition.clients=1", "cohort=1", *adapter)
    session, _, local = one_round(*alone)
    after = session.state.server["params"]
    assert all(torch.allclose(after[name], leaf, atol=1e-6) for name, leaf in local[0].items())
    moved = {name for name, leaf in local[0].items() if not torch.equal(leaf, session.model.params[name])}
    assert moved == ({"0.b.weight", "2.b.weight", "4.weight", "4.bias"} if adapter else {*session.model.params})


def test_without_a_layer_to_merge_it_is_fedavg_and_says_so():
    with pytest.warns(UserWarning, match="no layer to merge .* 'lorm' is FedAvg"):
        ours = toy.on_heads_alone("lorm")
    assert torch.equal(ours, toy.on_heads_alone("fedavg"))


# --- property --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [(), ADAPTED])
def test_a_merge_is_the_least_squares_solution(adapter):
    session, inputs, local = one_round("strategy.gamma=1.0", *adapter)
    sent, after = inputs.shared["params"], session.state.server["params"]
    path = "0.b" if adapter else "0"
    name = f"{path}.weight"
    x = [samples(client) for client in inputs.clients]
    if adapter:  # the inputs of B are A x, with one A for all
        x = [one @ sent["0.a.weight"].T for one in x]
    y = [one @ local[client.id][name].T for one, client in zip(x, inputs.clients, strict=True)]
    solution = torch.linalg.lstsq(torch.cat(x), torch.cat(y)).solution.T
    assert torch.allclose(after[name], solution, atol=1e-6)
    mean = torch.stack([params[name] for params in local.values()]).mean(0)
    errors = [float((torch.cat(x) @ w.T - torch.cat(y)).square().sum()) for w in (after[name], mean)]
    assert errors[0] < 0.99 * errors[1]
    if not adapter:  # the second layer: its inputs are those of the client's own first layer
        h = [(samples(c) @ local[c.id]["0.weight"].T + local[c.id]["0.bias"]).relu() for c in inputs.clients]
        y = [one @ local[c.id]["2.weight"].T for one, c in zip(h, inputs.clients, strict=True)]
        best = torch.linalg.lstsq(torch.cat(h), torch.cat(y), driver="gelsd").solution.T  # h may have dead units
        found, best = ((torch.cat(h) @ w.T - torch.cat(y)).square().sum() for w in (after["2.weight"], best))
        assert torch.allclose(found, best, rtol=1e-4)


def test_uploads_by_hand():
    # Round 0 trains B: for each of the two layers a Gram matrix of 3 inputs, 6 numbers, and an update 3 x 6, and the
    # head's 14 numbers. Round 1 trains A: Gram matrices of 8 and 6 inputs, 36 and 21 numbers, and updates 8 x 3, 6 x 3.
    sink = toy.Rows()
    config = toy.config(*ADAPTED, "tasks=1", method="lorm")
    cfl.run(config, stream=toy.stream(1, multi_head=True), sink=sink)
    assert [row["bytes_up"] for row in sink.rows] == [
        3 * 4 * (2 * (6 + 18) + 14),
        3 * 4 * (36 + 24 + 21 + 18 + 14),
    ]


# --- conformance -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("more", [("tasks=2",), pytest.param((), marks=pytest.mark.slow)])
def test_conformance_with_adapters(more):
    check_strategy(LoRM(), config=toy_config(*ADAPTED, *more))


def test_sums_are_enough():
    runs = [
        cfl.run(toy.config(*ADAPTED, *own, "local.lr=0.3", method="lorm"), stream=toy.stream())
        for own in ((), ("secagg=full",))
    ]
    assert torch.allclose(*(toy.flat(run.params) for run in runs), atol=1e-3)


def test_noise_is_refused():
    with pytest.raises(ConfigError, match=r"noise in Gram matrices would decide their inverses; set dp.level=none"):
        toy.config("dp.noise_multiplier=1", "agg.weights=uniform", method="lorm")


@pytest.mark.parametrize("rule", ["feddf", "fedavgm", "fednova", "median", "norm_bound"])
def test_rules_on_the_mean_of_the_updates_are_refused(rule):
    """Layers are merged from other uploads."""
    with pytest.raises(
        ConfigError, match=f"'{rule}' acts on the mean of the updates, of which 'lorm' sends only a part"
    ):
        cfl.run(toy.config("public.name=stream", method=f"lorm+{rule}"), stream=toy.stream())
