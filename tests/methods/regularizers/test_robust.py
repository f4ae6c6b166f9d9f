"""The rules that combine updates: by hand and against brute force, their limits, and what hostile clients can move."""

from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import cfl
import cfl.testing
from cfl.contract import LocalRegularizer, Strategy
from cfl.contract.combining import STRATEGY, WEIGHTS, WORK, gathers
from cfl.contract.composed import ComposedMethod
from cfl.core import ConfigError, tree
from cfl.core.options import build
from cfl.methods.regularizers import RFA, Bulyan, Krum, Median, NormBound, TrimmedMean
from cfl.methods.regularizers.stacks import distances, krum_scores, part, rows
from cfl.methods.strategies.fot import FOT
from cfl.methods.subspace.sketch import pack, unpack
from tests import toy

ALIKE = torch.ones(5, dtype=torch.float64)
RULES = (Median(), TrimmedMean(), Krum(), Bulyan(), RFA(), NormBound())
by_name = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def updates(clients, dtype=torch.float64):
    """Two leaves (clients, ...) with seeded entries."""
    return {"a": toy.random(clients, 3, 2).to(dtype), "b": toy.random(clients, 4).to(dtype) * 3}


def of(*values):
    """A leaf of one number for each client."""
    return {"w": torch.tensor(values, dtype=torch.float64)[:, None]}


def test_median_by_hand_and_as_numpy_has_it():
    assert Median().aggregate(of(5, 1, 9), ALIKE[:3], None)["w"].item() == 5
    assert Median().aggregate(of(5, 1, 9, 7), ALIKE[:4], None)["w"].item() == 6  # the mean of 5 and 7
    for clients in (1, 4, 5):
        stacked = updates(clients)
        found = Median().aggregate(stacked, ALIKE, None)
        for name, leaf in stacked.items():
            assert np.array_equal(found[name].numpy(), np.median(leaf.numpy(), axis=0))


def test_trimmed_mean_by_hand():
    # a fifth of five clients is one at each end: (2 + 3 + 7) / 3 = 4
    assert TrimmedMean(trim=0.2).aggregate(of(3, 100, 2, 7, -50), ALIKE, None)["w"].item() == 4
    # 0.4 leaves the median; 0.19 leaves nobody out
    assert TrimmedMean(trim=0.4).aggregate(of(3, 100, 2, 7, -50), ALIKE, None)["w"].item() == 3
    assert TrimmedMean(trim=0.19).aggregate(of(3, 100, 2, 7, -50), ALIKE, None)["w"].item() == pytest.approx(62 / 5)


@pytest.mark.parametrize("chosen", [1, 3, 0])
def test_krum_against_a_double_loop(chosen):
    stacked, clients, f = updates(9), 9, 2  # floor(0.25 * 9)
    vectors = [toy.flat(own) for own in toy.unstacked(stacked)]
    scores = []
    for i in range(clients):
        others = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in range(clients) if j != i)
        scores.append(sum(others[: clients - f - 2]))
    assert krum_scores(distances(rows(stacked)), f).tolist() == pytest.approx(scores)
    best = sorted(range(clients), key=scores.__getitem__)[: chosen or clients - f]
    expected = sum(vectors[i] for i in best) / len(best)
    found = Krum(hostile=0.25, chosen=chosen).aggregate(stacked, torch.ones(9), None)
    assert torch.allclose(toy.flat(found), expected, atol=1e-12, rtol=0)


def test_krum_refuses_more_hostile_clients_than_its_proof_allows():
    text = r"'krum' cannot run like this: regularizer.krum.hostile=0.4 is 4 of 10 clients, and 2 f \+ 2 < n; lower it"
    with pytest.raises(ConfigError, match=text):
        toy.config("partition.clients=10", "cohort=12", "regularizer.krum.hostile=0.4", method="krum")
    toy.config("partition.clients=11", "cohort=11", "regularizer.krum.hostile=0.4", method="krum")  # 2 * 4 + 2 < 11


def test_krum_refuses_to_choose_more_clients_than_are_honest():
    ten = ("partition.clients=10", "cohort=10", "regularizer.krum.hostile=0.2")  # 2 of 10
    with pytest.raises(ConfigError, match="krum.chosen=9 of 10 clients leaves fewer out than the 2 .*; set at most 8"):
        toy.config(*ten, "regularizer.krum.chosen=9", method="krum")
    toy.config(*ten, "regularizer.krum.chosen=8", method="krum")


def test_bulyan_against_loops():
    """Eleven clients, of which two may be hostile (4 f + 3 = 11): 7 are selected, and 3 of 7 values count."""
    stacked, n, f = updates(11), 11, 2  # floor(0.19 * 11)
    vectors = [toy.flat(own) for own in toy.unstacked(stacked)]

    def score(i, among):
        distances = sorted(float(((vectors[i] - vectors[j]) ** 2).sum()) for j in among if j != i)
        return sum(distances[: len(among) - f - 2])

    left, values, expected = [*range(n)], [], []
    while len(values) < n - 2 * f:
        best = min(left, key=lambda i: score(i, left))
        left.remove(best)
        values.append(vectors[best].numpy())
    for column in np.stack(values).T:
        middle = np.median(column)
        expected.append(np.mean(sorted(column, key=lambda value, middle=middle: abs(value - middle))[:3]))
    found = Bulyan(hostile=0.19).aggregate(stacked, torch.ones(n), None)
    assert np.allclose(toy.flat(found).numpy(), expected, atol=1e-12, rtol=0)


def test_bulyan_by_hand():
    # f = 1. The scores among seven, by four neighbours: 15, 10, far, 10, 15, 30, 30, so 2 is selected; then 3 (score
    # 9), 1 (10), 4 (1) and 5 (25, as 0 has, which comes later). Of 1 to 5, 2, 3 and 4 are nearest to the median 3.
    assert Bulyan(hostile=0.15).aggregate(of(1, 2, 60, 3, 4, 5, 0), torch.ones(7), None)["w"].item() == 3


def test_bulyan_refuses_more_hostile_clients_than_its_proof_allows():
    text = r"regularizer.bulyan.hostile=0.2 is 2 of 10 clients, and n >= 4 f \+ 3; lower it"
    with pytest.raises(ConfigError, match=text):
        toy.config("partition.clients=10", "cohort=12", "regularizer.bulyan.hostile=0.2", method="bulyan")
    toy.config("partition.clients=11", "cohort=11", "regularizer.bulyan.hostile=0.2", method="bulyan")


def test_rfa_minimises_the_weighted_sum_of_distances():
    stacked, weights = updates(7), torch.tensor([1.0, 2, 1, 5, 1, 1, 3], dtype=torch.float64)
    vectors, alpha = torch.stack([toy.flat(own) for own in toy.unstacked(stacked)]).numpy(), (weights / 14).numpy()

    def cost(z):
        return alpha @ np.linalg.norm(vectors - z, axis=1)

    best = minimize(cost, vectors.mean(axis=0), method="BFGS", options={"gtol": 1e-9})
    found = toy.flat(RFA(iterations=1000).aggregate(stacked, weights, None)).numpy()
    assert cost(found) <= best.fun + 1e-9
    assert np.allclose(found, best.x, atol=1e-4)
    costs = [cost(toy.flat(RFA(iterations=n).aggregate(stacked, weights, None)).numpy()) for n in (1, 2, 4, 8, 16)]
    assert all(later <= earlier for earlier, later in pairwise(costs))


def test_one_weiszfeld_iteration_by_hand():
    # From the median 4 of 0, 2, 6 and 14: distances 4, 2, 2 and 10. With a last weight of 3, the weights are as
    # 1/4 : 1/2 : 1/2 : 3/10 = 5 : 10 : 10 : 6, and v = (20 + 60 + 84) / 31.
    weights = torch.tensor([1.0, 1.0, 1.0, 3.0], dtype=torch.float64)
    assert RFA(iterations=1).aggregate(of(0, 2, 6, 14), weights, None)["w"].item() == pytest.approx(164 / 31)
    # From the median 1 of 0, 1 and 4: distances 1, nu = 1/2 in place of 0, and 3. With a last weight of 2, the weights
    # are as 1 : 2 : 2/3 = 3 : 6 : 2, and v = (6 + 8) / 11.
    found = RFA(iterations=1, smoothing=0.5).aggregate(of(0, 1, 4), torch.tensor([1.0, 1.0, 2.0]), None)
    assert found["w"].item() == pytest.approx(14 / 11)


@pytest.mark.parametrize("size", [1e6, 1e12, 1e30, 1e38])
def test_the_geometric_median_ignores_the_size_of_hostile_updates(size):
    """Four of ten clients: two thirds of the honest weight pulls back, so v stays within a few honest diameters."""
    honest = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    found = RFA().aggregate({"w": torch.cat([honest, torch.full((4, 20), size)])}, torch.ones(10).double(), None)["w"]
    assert (found - honest.mean(dim=0)).norm() < 3 * honest.norm(dim=1).max()


def test_a_share_that_is_no_client_is_warned_of():
    with pytest.warns(
        UserWarning, match="a share of 0.2 of 4 clients is no client, .* share of at least 0.25, or more"
    ):
        TrimmedMean().aggregate(of(1, 2, 3, 4), ALIKE[:4], None)


def test_a_round_of_fewer_clients_than_the_proof_needs_is_warned_of():
    """Two of five: by one neighbour the scores are 1, 1, 2.25, 0, 0, so Krum takes a hostile update. Bulyan has one of
    four, its usual share of a cohort of eight, and is left with the median of the first two selected, 1 and 2."""
    with pytest.warns(UserWarning, match=r"hostile ones may decide: .*krum.* 2 of 5 clients, and 2 f"):
        assert Krum(hostile=0.4, chosen=1).aggregate(of(1, 2, 3.5, 100, 100), ALIKE, None)["w"].item() == 100
    with pytest.warns(UserWarning, match=r"hostile ones may decide: .*bulyan.* 1 of 4 clients, and n >= 4"):
        assert Bulyan(hostile=0.25).aggregate(of(1, 2, 4, 100), ALIKE[:4], None)["w"].item() == 1


def test_a_share_is_rounded_down_but_not_for_an_error_of_floating_point():
    assert (part(0.29, 100), 0.29 * 100) == (29, 28.999999999999996)
    assert part(0.299, 100) == 29


def test_norm_bound_by_hand():
    stacked = {"a": torch.tensor([[3.0], [0.0], [6.0]]), "b": torch.tensor([[4.0], [1.0], [8.0]])}  # norms 5, 1, 10
    weights = torch.tensor([1.0, 1.0, 2.0], dtype=torch.float64)
    # bound 2: factors 2/5, 1 and 1/5; a = (1.2 + 0 + 2 * 1.2) / 4, b = (1.6 + 1 + 2 * 1.6) / 4
    found = NormBound(bound=2.0).aggregate(stacked, weights, None)
    assert [found[name].item() for name in "ab"] == pytest.approx([0.9, 1.45])
    # the median norm is 5: factors 1, 1 and 1/2; a = (3 + 0 + 2 * 3) / 4, b = (4 + 1 + 2 * 4) / 4
    found = NormBound().aggregate(stacked, weights, None)
    assert [found[name].item() for name in "ab"] == pytest.approx([2.25, 3.25])
    # the square of 1e30 is no float32; and where most updates are 0, the bound is 0
    assert NormBound(bound=1.0).aggregate({"w": torch.tensor([[1e30]])}, ALIKE[:1], None)["w"].item() == 1
    assert NormBound().aggregate(of(0, 0, 5), ALIKE[:3], None)["w"].item() == 0
    # a client's own update, of norm 5, to the bound 2; a counter is no part of the norm and stays
    update = {"w": torch.tensor([3.0, 4.0]), "n": torch.tensor(7)}
    sent = NormBound(bound=2.0, at="client").send(update, None, 1)
    assert (sent["w"].tolist(), sent["n"].item()) == (pytest.approx([1.2, 1.6]), 7)


def test_sketches_count_at_most_their_median_size():
    uploads = {"sketch/1": torch.tensor([[1.0, 0], [0, 2], [100, 0]]), "n": torch.tensor([1.0, 1, 1])}
    sizes = Strategy().sizes(uploads, None)
    assert sizes["sketch/1"].tolist() == [1, 2, 100]
    capped = NormBound().cap(uploads, sizes, None)
    assert capped["sketch/1"].tolist() == [[1, 0], [0, 2], [2, 0]] and capped["n"].tolist() == [1, 1, 1]
    assert NormBound(sketch_bound=10.0).cap(uploads, sizes, None)["sketch/1"].tolist()[2] == [20, 0]


def test_a_rule_may_cap_sketches_alone():
    """The cap of a class without `aggregate` was never called."""

    class Drops(LocalRegularizer):
        def cap(self, uploads, sizes, info):
            return tree.scale(uploads, 0.0)

    composed = ComposedMethod({STRATEGY: Strategy(), "drops": Drops()})
    assert composed.gathers == {STRATEGY: "stack", "drops": "mean", WORK: "stack"}
    info = SimpleNamespace(phase=cfl.Phase("train", work=True), clients=(0, 1), place="")
    uploads = {STRATEGY: of(1.0, 4.0), WORK: of(2.0, 3.0), WEIGHTS: {"": torch.tensor([2.0, 1.0], dtype=torch.float64)}}
    found = composed._combined(uploads, info)
    assert found[WORK]["w"].item() == 0 and found[STRATEGY]["w"].item() == 2  # (2 * 1 + 4) / 3


def test_the_size_of_a_gram_matrix_is_its_energy():
    x = toy.random(4, 9)  # a trace of |X|^2, whatever the directions
    grams = torch.stack([pack(x @ x.T), pack(torch.eye(4, dtype=x.dtype)), pack(-torch.eye(4, dtype=x.dtype))])
    sizes = FOT().sizes({"sketch/1": grams, "energy/1": torch.tensor([[3.0, 4.0]] * 3)}, None)
    assert sizes["sketch/1"].tolist() == pytest.approx([x.square().sum().item(), 4.0, 4.0])
    assert sizes["energy/1"].tolist() == [5, 5, 5]


def test_a_poisoned_sketch_is_as_large_as_the_clients_own_and_alike_in_all_directions():
    x = toy.random(4, 9)
    sent = FOT().poisoned({"sketch/1": pack(x @ x.T), "sketch/2": x, "energy/1": torch.tensor([8.0, 2.0])}, 3)
    expected = torch.eye(4, dtype=x.dtype) * x.square().sum() / 4
    assert torch.allclose(unpack(sent["sketch/1"]), expected)
    assert sent["sketch/2"].norm().item() == pytest.approx(x.norm().item()) and not sent["sketch/2"].equal(x)
    assert sent["energy/1"].tolist() == [8, 8]


@pytest.mark.parametrize(
    "rule",
    [TrimmedMean(trim=0.0), Krum(chosen=5, hostile=0.0), Bulyan(hostile=0.0), NormBound(bound=1e30)],
    ids=["trim", "krum", "bulyan", "bound"],
)
def test_limits_are_the_mean(rule):
    stacked = updates(5, torch.float32)
    found = rule.aggregate(stacked, ALIKE, None)
    assert tree.equal(found, LocalRegularizer().aggregate(stacked, ALIKE, None))
    assert torch.allclose(found["a"], stacked["a"].mean(dim=0))


@pytest.mark.parametrize("method", ["fedavg", "fot"])
def test_a_huge_bound_is_the_strategy_alone_to_the_bit(method):
    huge = ("regularizer.norm_bound.bound=1e30", "regularizer.norm_bound.sketch_bound=1e30")
    for own in (huge, ("regularizer.norm_bound.bound=1e30", "regularizer.norm_bound.at=client")):
        found = cfl.run(toy.config(*own, method=f"{method}+norm_bound"), stream=toy.stream())
        alone = cfl.run(toy.config(method=method), stream=toy.stream())
        assert tree.equal(found.params, alone.params)
        assert found.metrics["bytes_up"] == alone.metrics["bytes_up"]


@by_name
def test_hostile_clients_of_any_size_move_the_result_little(rule):
    honest = updates(8)
    evil = tree.map(lambda leaf: torch.full_like(leaf[:2], 1e6), honest)
    stacked = {name: torch.cat([leaf, evil[name]]) for name, leaf in honest.items()}
    found = rule.aggregate(stacked, torch.ones(10, dtype=torch.float64), None)
    if isinstance(rule, NormBound):  # bounded, but not within the range: at most the median norm for each
        norms = torch.stack([toy.flat(own) for own in toy.unstacked(stacked)]).norm(dim=1)
        assert toy.flat(found).norm() <= norms.quantile(0.5)
        return
    for name, leaf in honest.items():
        assert (found[name] >= leaf.amin(dim=0) - 1e-9).all() and (found[name] <= leaf.amax(dim=0) + 1e-9).all()


@by_name
def test_counters_are_those_of_the_lowest_client_and_weights_reach_no_strategy(rule):
    composed = ComposedMethod({"strategy": Strategy(), "rule": rule})
    stacked = {"w": torch.tensor([1.0, 1.0, 1.0]), "count": torch.tensor([7, 9, 9])}
    trees, info = {STRATEGY: stacked, WEIGHTS: {"": ALIKE[:3]}}, SimpleNamespace(place="task 0")
    found = composed._combined(trees, info)
    assert set(found) == {STRATEGY} and found[STRATEGY]["count"].item() == 7
    assert found[STRATEGY]["w"].item() == pytest.approx(1.0)


@by_name
def test_rules_stack_updates_and_one_alone_stacks_sketches(rule):
    found = gathers({"strategy": FOT(), "rule": rule})
    assert found[STRATEGY] == "stack" and found[WORK] == ("stack" if isinstance(rule, NormBound) else "sum")
    at_client = gathers({"strategy": FOT(), "rule": NormBound(bound=1.0, at="client")})
    assert at_client[STRATEGY] == "mean" and at_client[WORK] == "sum"


@pytest.mark.slow
@by_name
def test_rules_pass_the_conformance_kit(rule):
    cfl.testing.check_strategy(rule)


@pytest.mark.slow
def test_a_fixed_bound_is_refused_with_fednova():
    """FedNova multiplies the mean of divided updates by the mean number of steps, after the bound."""
    cfl.resolve("iris", method="fednova+norm_bound")  # the median of the divided updates is a bound
    with pytest.raises(ConfigError, match="a fixed bound limits no update"):
        cfl.resolve("iris", method="fednova+norm_bound", overrides=["regularizer.norm_bound.bound=0.1"])


def test_a_client_that_bounds_its_own_update_passes_the_conformance_kit():
    cfl.testing.check_strategy(NormBound(bound=0.5, at="client"))


@pytest.mark.parametrize("name", ["median", "trimmed_mean", "krum", "rfa", "norm_bound"])
def test_protected_sums_refuse_rules_that_see_each_update(name):
    with pytest.raises(ConfigError, match=f"'{name}' needs each client's own upload, which secagg=full hides"):
        toy.config("secagg=full", method=f"fot+{name}")
    private = ("dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson")
    with pytest.raises(ConfigError, match=f"'{name}' needs each client's own upload, but dp.level=client protects"):
        toy.config(*private, method=f"fedavg+{name}")


def test_a_client_bounds_its_own_update_under_secure_aggregation():
    own = ("regularizer.norm_bound.at=client", "regularizer.norm_bound.bound=0.01", "secagg=sum")
    found = cfl.run(toy.config(*own, "tasks=1", "rounds=1", method="norm_bound"), stream=toy.stream())
    still = cfl.run(toy.config("tasks=1", "rounds=1", "local.lr=1e-30", method="fedavg"), stream=toy.stream())
    moved = toy.flat(tree.sub(found.params, still.params))
    assert 0 < moved.norm() <= 0.01 + 1e-5  # a mean of updates of at most this norm; integers round
    with pytest.raises(ConfigError, match="at=client needs a fixed bound"):
        build(NormBound, {"at": "client"}, "regularizer.norm_bound")


def test_two_rules_are_refused():
    with pytest.raises(ConfigError, match="'median' and 'rfa' both decide how updates are combined; use one"):
        toy.config(method="fot+median+rfa")

    @dataclass(frozen=True)
    class Own(LocalRegularizer):
        def aggregate(self, updates, weights, info):
            return tree.map(lambda leaf: leaf[0], updates)

    with pytest.raises(ConfigError, match="both decide how updates are combined"):
        cfl.run(toy.config(method="fedavg"), stream=toy.stream(), regularizers={"one": Own(), "two": Own()})
