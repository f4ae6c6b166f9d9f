"""Whole runs under secure aggregation and differential privacy: what they equal, survive, report and refuse."""

import json
import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

import cfl
from cfl import cli
from cfl.aggregation.accounting import Releases, epsilon
from cfl.assembly import methods as membership
from cfl.assembly.privacy_rules import shows_each
from cfl.contract import STAGES, Phase
from cfl.core import ConfigError, plugins, rng, tree
from cfl.engines.pool import forks
from cfl.methods.strategies import FOT, SingleTask
from cfl.runtime.builder import build_session
from cfl.runtime.population import Population
from tests import toy
from tests.runtime.test_resume import Killed, finished

SCHEDULE = ("tasks=2", "rounds=2")
# rdp is quick, and an upper bound like the other
CLIENT = ("dp.noise_multiplier=1", "dp.accountant=rdp", "agg.weights=uniform", "sampling=poisson", "dp.amplify=false")
HIDDEN = (*CLIENT[:4], "dp.amplify=true")  # who takes part is protected too
EXAMPLE = ("dp.level=example", *CLIENT[:3])
GRAM = ("strategy.sketch=gram", "strategy.project_at=server")
ALONE = ("cohort=1", "sampling=poisson")  # of 4 clients: nobody is drawn in (3/4)^4 = 32 % of the rounds
PUBLIC = ("public.name=stream",)


@pytest.fixture(autouse=True)
def quick_accounting(monkeypatch):
    """Runs of one test often ask for the same epsilon, which takes half a second."""
    monkeypatch.setattr("cfl.aggregation.accounting.epsilon", lambda plan, *rest: known_epsilon(tuple(plan), *rest))


known_epsilon = cache(epsilon)


class Log(toy.Rows):
    """Keeps what a run reports: rows, notes, warnings, rows of tasks."""

    def __init__(self):
        super().__init__()
        self.notes, self.warnings, self.tasks = [], [], []

    def start(self, config, notes, total_rounds):
        self.notes += notes

    def task(self, row):
        self.tasks.append(row)

    def warn(self, text):
        self.warnings.append(text)


class Kill(Log):
    """Dies when so many rounds are done, before the checkpoint of the last is written."""

    def __init__(self, rounds):
        super().__init__()
        self.last = rounds

    def round(self, row):
        if row["rounds_done"] == self.last:
            raise Killed


def run(*options, method="fedavg", **more):
    """A run, of two tasks unless said otherwise, and its log."""
    log = Log()
    config = toy.config(*SCHEDULE, *options, method=method)
    return cfl.run(config, stream=toy.stream(config.tasks), sink=log, **more), log


def timeless(row):
    return {name: value for name, value in row.items() if name != "seconds"}


def session_of(*options, method="fedavg", module=None, strategy=None):
    """A run to be gone through round by round, and its log."""
    config, log = toy.config(*SCHEDULE, *options, method=method), Log()
    members = {**membership.build(config), **({"strategy": strategy} if strategy else {})}
    session = build_session(config, toy.stream(config.tasks), members, module, None, log)
    session.start(False)
    return session, log


def copied(trees):
    return {name: tree.clone(leaves) for name, leaves in trees.items()}


def same(one, other):
    """Whether trees by name are equal to the bit."""
    return list(one) == list(other) and all(
        list(leaves) == list(other[name]) and all(torch.equal(leaf, other[name][key]) for key, leaf in leaves.items())
        for name, leaves in one.items()
    )


def farthest(one, other):
    """The largest difference of two models' floating-point leaves."""
    floats = [name for name, leaf in one.items() if leaf.is_floating_point()]
    return max(float((one[name] - other[name]).abs().max()) for name in floats)


# --- secure aggregation ----------------------------------------------------------------------------------------------

RUNS = {
    "scaffold": (("partition.name=lda", "partition.alpha=0.5", "local.batch_size=3"), "scaffold"),
    "drop-outs": (("cohort=6", "partition.clients=8", "drop_rate=0.3"), "fot+scaffold"),
    "client": ((*CLIENT, "partition.clients=8", "cohort=5", "rounds=1"), "fot"),
    "client, work": ((*CLIENT[:2], CLIENT[3], "partition.clients=8", "cohort=6", "dp.protect=work"), "fot"),
    "example": ((*EXAMPLE, *GRAM, "rounds=1"), "fot"),
    "32 bits": (("secure.bits=32", "secure.fraction_bits=16"), "fednova"),
}


@pytest.mark.parametrize("name", toy.quick(*[*RUNS][::3], of=RUNS))
def test_masks_change_no_bit_of_a_run(name):
    options, method = RUNS[name]
    (bare, plain), (full, masked) = (run(*options, f"secagg={mode}", method=method) for mode in ("sum", "full"))
    assert same({"params": bare.params}, {"params": full.params})
    assert [timeless(row) for row in masked.rows] == [timeless(row) for row in plain.rows]
    assert timeless(full.metrics) == timeless(bare.metrics)
    assert masked.warnings == plain.warnings and masked.notes == plain.notes
    assert any(row["aborted"] is None and row["bytes_up"] for row in masked.rows)


@pytest.mark.parametrize("weights", ["samples", "uniform"])
@pytest.mark.parametrize("fraction_bits", [10, 24])
def test_a_secure_round_is_the_plain_one_within_its_rounding(fraction_bits, weights):
    """C = 3 clients each round an entry of weight x update by half a unit: the mean is off by 3 2^-(f+1) / W, where
    the weights add up to W = 3 x 12 samples or 3. The model is in float64, which adds nothing of that size."""
    options = ("tasks=1", "rounds=1", f"agg.weights={weights}", f"secure.fraction_bits={fraction_bits}")
    plain, secure = (
        cfl.run(toy.config(*options, f"secagg={mode}", method="fedavg"), stream=toy.stream(1), model=toy.mlp(8, 6, 2))
        for mode in ("none", "full")
    )
    whole = 36 if weights == "samples" else 3
    assert 0 < farthest(plain.params, secure.params) <= 3 * 2.0 ** -(fraction_bits + 1) / whole + 1e-14


STRATEGIES = sorted(name for name in plugins.strategies.names() if plugins.strategies.get(name).gathers != "stack")
RULES = sorted(name for name in plugins.local.names() if not shows_each(plugins.local.get(name)()))
DISTILLING = [name for name in RULES if plugins.local.get(name).needs_public]


@pytest.mark.parametrize(
    "method", toy.quick("fot", "er", "gpm", "scaffold", "moon", "fedsol", of=[*STRATEGIES, *RULES])
)
def test_every_method_runs_under_secure_aggregation(method):
    """Two rounds are off by 2^-25 each; what follows is a few steps of SGD that multiply that by less than a
    hundred. FedDF and FedProj distil with Adam, which makes steps of its rate of any gradient, and come less near. So
    does LoRM, whose inverses multiply the rounding by the condition of Gram matrices."""
    options = PUBLIC if method in DISTILLING else ()
    near = 1e-3 if options or method == "lorm" else 1e-5
    runs = (
        run("rounds=1", "local.batch_size=12", *options, f"secagg={mode}", method=method) for mode in ("none", "full")
    )
    (plain, _), (secure, log) = runs
    assert log.warnings == [] and not any(row["aborted"] or row["clipped"] for row in log.rows)
    assert farthest(plain.params, secure.params) < near
    assert secure.metrics["bytes_up"] > plain.metrics["bytes_up"]
    assert secure.metrics["bytes_down"] > plain.metrics["bytes_down"]


def test_the_basis_under_secure_aggregation_spans_what_it_spans_without():
    """The projectors of each layer differ by 1e-4 at most, though sums are rounded to 2^-24."""
    bases = []
    for mode in ("none", "full"):
        strategy = toy.recording(FOT)()
        run(f"secagg={mode}", method="fot", strategy=strategy)
        bases.append(strategy.rounds[-1][2]["basis"])
    for name, basis in bases[0].items():
        other = bases[1][name]
        assert 0 < basis.shape[1] < basis.shape[0] and basis.shape == other.shape
        difference = basis.double() @ basis.double().T - other.double() @ other.double().T
        assert float(torch.linalg.matrix_norm(difference, 2)) < 1e-4


def test_running_statistics_are_averaged_and_counters_stay():
    def module():
        with rng.fork(2):
            return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))

    options = ("tasks=1", "rounds=1")
    plain, secure = (
        cfl.run(toy.config(*options, f"secagg={mode}", method="fedavg"), stream=toy.stream(1), model=module()).params
        for mode in ("none", "full")
    )
    assert secure["1.num_batches_tracked@0"].item() == 0
    assert torch.allclose(secure["1.running_mean@0"], plain["1.running_mean@0"], atol=2**-22)  # float32 near 1
    assert plain["1.running_mean@0"].abs().max() > 0.01


# --- drop-outs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_clients_that_drop_out_leave_no_state(secagg):
    options = ("partition.clients=12", "cohort=10", "drop_rate=0.4", "secure.quorum=0.3", f"secagg={secagg}")
    session, log = session_of("tasks=1", "rounds=6", *options, method="scaffold")
    stages = Counter()
    for position in range(len(session.schedule)):
        before, info = copied(session.state.clients), session.prepare(position).info
        session.round(position)
        row, after = log.rows[-1], session.state.clients
        assert row["dropped"] == info.dropped and set(info.dropped) <= set(info.clients)
        assert row["aborted"] is None and row["clients"] == len(info.uploading)
        stages.update(info.dropped.values())
        for id in range(12):
            if id in info.uploading:  # with those that drop out at "unmask": their control variates have moved
                assert id not in before or not same({0: before[id]}, {0: after[id]})
                assert session.state.last_task[id] == info.task
            else:
                assert (id in before) == (id in after) and (id not in before or same({0: before[id]}, {0: after[id]}))
    assert set(stages) == set(STAGES)  # each has occurred


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_the_sum_is_over_the_clients_that_have_sent(secagg):
    """FedAvg, equal shares: the new model is the mean of the survivors' models, those lost at "unmask" among them."""
    module = toy.mlp(8, 6, 2)
    options = ("rounds=3", "partition.clients=8", "cohort=8", "drop_rate=0.4", "secure.quorum=0.2", f"secagg={secagg}")
    session, _ = session_of(*options, module=module)
    lost = 0
    for position in range(len(session.schedule)):
        models, info = {}, session.prepare(position).info
        session.round(position, lambda _, client, params, into=models: into.update({client: tree.clone(params)}))
        assert tuple(models) == info.uploading
        lost += sum(stage == "unmask" for stage in info.dropped.values())
        for name, leaf in session.state.server["params"].items():
            mean = sum(model[name] for model in models.values()) / len(models)
            assert torch.allclose(leaf, mean, atol=2**-24, rtol=0)
    assert lost > 0


@pytest.mark.parametrize("secagg", ["none", "sum", "full"])
def test_an_aborted_round_changes_nothing_and_the_run_goes_on(secagg):
    options = ("tasks=1", "rounds=10", "drop_rate=0.75", "cohort=4", "eval_every=1", f"secagg={secagg}")
    session, log = session_of(*options, method="scaffold")
    reasons = ["no client of the cohort has answered", *(["clients are left after stage"] if secagg != "none" else [])]
    aborted = 0
    for position in range(len(session.schedule)):
        server, clients, tasks = copied(session.state.server), copied(session.state.clients), session.state.last_task
        tasks, warned, info = dict(tasks), len(log.warnings), session.prepare(position).info
        session.round(position)
        row = log.rows[-1]
        if row["aborted"] is None:
            assert len(log.warnings) == warned and row["clients"] > 0
            continue
        aborted += 1
        assert same(server, session.state.server) and same(clients, session.state.clients)
        assert session.state.last_task == tasks and session.state.position == position + 1
        assert any(reason in row["aborted"] for reason in reasons) and row["clients"] == 0
        (text,) = log.warnings[warned:]
        assert text == f"round aborted, nothing is changed ({info.place}): {row['aborted']}"
        # the model went down to all; up went two public keys of 32 bytes of each client that lived through "keys"
        assert row["bytes_down"] >= len(info.clients) * sum(map(tree.nbytes, session.prepare(position).shared.values()))
        if secagg == "none":
            assert row["bytes_up"] == 0
        else:
            assert row["bytes_up"] >= 64 * sum(info.dropped.get(id) != "keys" for id in info.clients) > 0
        assert row["accuracy"] is not None  # and the model is looked at all the same
    assert 0 < aborted < len(session.schedule)
    metrics = session.finish().metrics
    for way in ("bytes_up", "bytes_down"):
        assert metrics[way] == sum(row[way] for row in log.rows)


@pytest.mark.parametrize("method", [*STRATEGIES, *RULES])
def test_every_method_survives_a_task_of_aborted_rounds(method):
    """With nine drop-outs in ten hardly a round has a sum, and no method may count on one."""
    public = PUBLIC if method in DISTILLING else ()
    result, log = run("rounds=1", "local.batch_size=12", "drop_rate=0.97", "secagg=sum", *public, method=method)
    rows = [row for row in log.rows if row["task"] == 0 and row["phase"] != "coverage"]
    assert any(row["aborted"] for row in rows) and len(log.tasks) == 2
    assert all(bool(leaf.isfinite().all()) for leaf in result.params.values())


def test_a_task_without_a_single_round_is_served_by_the_initial_model():
    """The second task starts from there too, and what it learns is its own."""
    session, log = session_of(strategy=SingleTask(), module=toy.mlp(8, 6, 2))
    initial = copied({"": session.state.server["params"]})
    keep, session.population.dropped = session.population.dropped, lambda ids, key: dict.fromkeys(ids, "upload")
    for position in range(len(session.schedule)):
        if session.schedule[position][0] == 1:
            session.population.dropped = keep
        session.round(position)
    assert [row["aborted"] is None for row in log.rows] == [False, False, True, True]
    first, second = ({"": session.strategy.serve(session.state.server, task)} for task in (0, 1))
    assert same(first, initial) and same(second, {"": session.state.server["params"]})
    assert farthest(first[""], second[""]) > 0.01


def test_excluded_clients_and_drop_outs_are_told_apart():
    class Breaks(cfl.Strategy):
        def finish(self, params, ctx, steps):
            upload, state = super().finish(params, ctx, steps)
            return tree.scale(upload, torch.where(ctx.client == 2, float("nan"), 1.0)), state

    options = ("partition.clients=8", "cohort=8", "drop_rate=0.2", "on_bad_update=exclude", "secagg=full")
    result, log = run(*options, strategy=Breaks())
    assert all(bool(leaf.isfinite().all()) for leaf in result.params.values())
    for row in log.rows:
        sends = row["dropped"].get(2, "unmask") == "unmask"
        assert row["excluded"] == ([2] if sends else [])
        gone = sum(stage != "unmask" for stage in row["dropped"].values())
        assert row["aborted"] is None and row["clients"] == 8 - gone - sends
    assert any(row["excluded"] for row in log.rows) and any(row["dropped"] for row in log.rows)


@dataclass(frozen=True)
class Spoils(cfl.Strategy):
    """Client 2 sends zeros and keeps its state, or sends NaN and counts its rounds, as the others do."""

    broken: bool = False

    def init_client(self, params, model):
        return {"rounds": torch.zeros(())}

    def finish(self, params, ctx, steps):
        upload, state = super().finish(params, ctx, steps)
        kept = torch.where(ctx.client == 2, math.nan if self.broken else 0.0, 1.0)
        return tree.scale(upload, kept), {"rounds": state["rounds"] + (kept != 0)}


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("secagg=full",),
        pytest.param(("secagg=sum", "engine=pool", "workers=2", "block=1"), marks=pytest.mark.slow),
        pytest.param(("engine=pool", "workers=1"), marks=pytest.mark.slow),
        pytest.param(("engine=vmapped",), marks=pytest.mark.slow),
    ],
    ids="+".join,
)
@pytest.mark.parametrize("reaction", ["raise", "exclude"])
def test_a_client_whose_update_is_not_finite_counts_as_zero_where_clients_are_protected(reaction, options):
    """Neither who is in the sum, nor the divisor, nor the noise tells that client 2 sent NaN: all is as if it had sent
    zeros. Its state stays the old one. Only the run's owner is told."""
    if "engine=pool" in options and not forks():
        pytest.skip("needs fork")
    options = (*CLIENT, "rounds=3", "cohort=4", f"on_bad_update={reaction}", *options)
    (zero, plain), (broken, spoiled) = (
        session_of(*options, module=toy.mlp(8, 6, 2), strategy=Spoils(broken)) for broken in (False, True)
    )
    for position in range(len(zero.schedule)):
        zero.round(position)
        broken.round(position)
    for session in (zero, broken):
        session.engine.close()
    assert same(zero.state.server, broken.state.server) and same(zero.state.clients, broken.state.clients)
    rounds = [float(state["strategy/rounds"]) for _, state in sorted(broken.state.clients.items())]
    assert rounds == [6.0, 6.0, 0.0, 6.0]
    for row, other in zip(spoiled.rows, plain.rows, strict=True):
        assert row["excluded"] == [] and row["clients"] == other["clients"] == 4
        assert row["shortened"] == other["shortened"] + 1 and math.isfinite(row["loss"])
    places = [f"task {task}, phase train, round {round}" for task in range(2) for round in range(3)]
    assert plain.warnings == []
    assert spoiled.warnings == [
        f"client 2 counts as zero: NaN or infinity in its update ({place}); lower local.lr" for place in places
    ]


# --- who takes part --------------------------------------------------------------------------------------------------


def population(*options):
    return Population(toy.stream(), toy.config("partition.clients=8", "cohort=3", *options, method="fedavg"))


KEYS = [rng.key(0, "round", number) for number in range(2000)]


def test_poisson_cohorts_have_the_right_mean_and_spread():
    """8 owners at rate 3/8: sizes are binomial, mean 3 and variance 15/8. Over K draws the mean is within 5 of its
    deviations sqrt(15 / 8K), the variance within 5 of about var sqrt(2 / K), each client's rate within 5 of its own."""
    people, phase = population("sampling=poisson"), Phase("train")
    assert people.expected(phase, (0,)) == 3.0
    cohorts = [people.cohort(phase, (0,), 0, key) for key in KEYS]
    sizes, drawn = torch.tensor([float(len(ids)) for ids in cohorts]), Counter(id for ids in cohorts for id in ids)
    assert abs(float(sizes.mean()) - 3.0) < 5 * math.sqrt(15 / 8 / len(KEYS))
    assert abs(float(sizes.var()) - 15 / 8) < 5 * 15 / 8 * math.sqrt(2 / len(KEYS))
    for id in range(8):
        assert abs(drawn[id] / len(KEYS) - 3 / 8) < 5 * math.sqrt(3 / 8 * 5 / 8 / len(KEYS))
    assert all(list(ids) == sorted(set(ids)) for ids in cohorts) and () in cohorts  # (5/8)^8 = 2.3 % of them
    assert cohorts == [people.cohort(phase, (0,), 0, key) for key in KEYS]


def test_only_owners_are_drawn_and_all_of_them_where_no_draw_is_asked_for():
    people = population("sampling=poisson", "partition.task_share=0.5")
    owners = people.owners((1,))
    assert len(owners) == 4
    drawn = {id for key in KEYS[:200] for id in people.cohort(Phase("train"), (1,), 0, key)}
    assert drawn == set(owners)
    assert people.cohort(Phase("sketch", cohort="available"), (1,), 0, 7) == owners
    few = population("sampling=poisson", "partition.task_share=0.25")  # 2 owners, fewer than the cohort
    assert all(few.cohort(Phase("train"), (1,), 0, key) == few.owners((1,)) for key in KEYS[:20])


def test_drop_outs_have_the_right_rate_at_every_stage():
    """Each of 8 clients in each of K rounds at rate 0.3, a quarter of that at each stage: within 5 deviations."""
    people, count = population("drop_rate=0.3"), 8 * len(KEYS)
    found = [people.dropped(tuple(range(8)), key) for key in KEYS]
    stages = Counter(stage for dropped in found for stage in dropped.values())
    assert set(stages) == set(STAGES)
    for stage in STAGES:
        assert abs(stages[stage] / count - 0.075) < 5 * math.sqrt(0.075 * 0.925 / count)
    assert found == [people.dropped(tuple(range(8)), key) for key in KEYS]
    assert all(set(people.dropped((2, 5), key)) <= {2, 5} for key in KEYS[:50])
    assert population().dropped(tuple(range(8)), KEYS[0]) == {}


def test_who_is_drawn_does_not_tell_who_drops_out():
    """Were the two draws of one key, those with the lowest numbers would be in both. Apart, a client is in both at
    rate 3/8 x 3/10, and the draws of two rounds are as independent."""
    people, count = population("sampling=poisson", "drop_rate=0.3"), 8 * (len(KEYS) - 1)
    cohorts = [set(people.cohort(Phase("train"), (0,), 0, key)) for key in KEYS]
    drops = [set(people.dropped(tuple(range(8)), key)) for key in KEYS]
    pairs = {
        3 / 8 * 3 / 10: sum(len(ids & lost) for ids, lost in zip(cohorts[1:], drops[1:], strict=True)),
        (3 / 8) ** 2: sum(len(one & next) for one, next in pairwise(cohorts)),
    }
    for rate, both in pairs.items():  # overlaps of neighbours share a cohort: twice the variance at most
        assert abs(both / count - rate) < 5 * math.sqrt(2 * rate / count)


@pytest.mark.parametrize("options", [(), EXAMPLE, CLIENT], ids="+".join)
def test_an_empty_cohort_is_aborted_where_clients_are_no_secret(options):
    result, log = run("rounds=4", *ALONE, *options)
    empty = [row for row in log.rows if not row["clients"]]
    assert 0 < len(empty) < len(log.rows) == 8
    assert all(row["aborted"] == "no client of the cohort has answered" for row in empty)
    assert all(row["bytes_up"] == row["bytes_down"] == 0 and row["loss"] is None for row in empty)
    assert len(log.warnings) == len(empty)
    assert all(bool(leaf.isfinite().all()) for leaf in result.params.values())


def test_an_empty_cohort_releases_noise_where_clients_are_a_secret():
    """The step is the noise over the one expected client: of 110 entries the deviation is within 5 / sqrt(220)."""
    session, log = session_of("rounds=4", *ALONE, *HIDDEN, "dp.clip=0.5")
    empty = 0
    for position in range(len(session.schedule)):
        before, info = tree.clone(session.state.server["params"]), session.prepare(position).info
        session.round(position)
        if info.clients:
            continue
        empty += 1
        row, step = log.rows[-1], tree.sub(session.state.server["params"], before)
        entries = torch.cat([leaf.flatten().double() for leaf in step.values()])
        assert len(entries) == 110
        assert float(entries.square().mean().sqrt()) == pytest.approx(0.5, rel=5 / math.sqrt(220))
        assert (row["aborted"], row["clients"], row["bytes_up"], row["bytes_down"]) == (None, 0, 0, 0)
        assert session.state.clients == {} and session.state.last_task.keys() <= set(range(4))
    assert empty > 0 and log.warnings == []


def test_who_only_shows_the_shape_of_the_noise_is_not_looked_at():
    """The local models that a run looks at are those of clients that were drawn."""
    seen = []
    options = ("tasks=1", "rounds=4", *ALONE, *HIDDEN, "eval_local=1")
    _, log = run(*options, observe=lambda info, client, params: seen.append((client, info.clients)))
    assert all(client in drawn for client, drawn in seen)
    assert [len(row.get("local", {"client": ()})["client"]) for row in log.rows] == [row["clients"] for row in log.rows]
    assert 0 in [row["clients"] for row in log.rows]


def test_it_does_not_matter_that_the_shape_of_the_noise_comes_of_a_nan():
    """Client 0, of whom the shape is taken, sends NaN; the run is told of it only in rounds that it is drawn to, and
    goes on, since to stop would tell who took part."""

    class Breaks(cfl.Strategy):
        def finish(self, params, ctx, steps):
            upload, state = super().finish(params, ctx, steps)
            return tree.scale(upload, torch.where(ctx.client == 0, float("nan"), 1.0)), state

    session, log = session_of("rounds=6", *ALONE, *HIDDEN, strategy=Breaks())
    empty = alone = 0
    for position in range(len(session.schedule)):
        ids, told = session.prepare(position).info.clients, len(log.warnings)
        session.round(position)
        empty, alone = empty + (not ids), alone + (ids == (0,))
        assert ["client 0 counts as zero: NaN or infinity" in text for text in log.warnings[told:]] == [True] * (
            0 in ids
        )
        row = log.rows[-1]
        assert row["aborted"] is None and row["excluded"] == [] and row["clients"] == len(ids)
    assert empty > 0 and alone > 0
    assert all(bool(leaf.isfinite().all()) for leaf in session.state.server["params"].values())


@pytest.mark.parametrize("protection", [CLIENT, HIDDEN], ids="+".join)
def test_the_share_that_a_regularizer_is_told_is_that_which_the_sum_is_divided_by(protection):
    """FedDyn's server adds alpha / N times the sum of what its clients have moved, and knows the sum from the mean,
    over the 2 of N = 4 that are expected or over those that were drawn. A clip that shortens nobody and noise of
    1e-9 leave the sum as it is."""
    options = ("tasks=1", "rounds=6", "cohort=2", *protection, "dp.clip=100", "dp.noise_multiplier=1e-11")
    session, log = session_of(*options, method="feddyn", module=toy.mlp(8, 6, 2))
    alpha, h, drawn = session.composed.regularizers["feddyn"].alpha, {}, set()
    for position in range(len(session.schedule)):
        before, models = tree.clone(session.state.server["params"]), []
        session.round(position, lambda _, client, params, into=models: into.append(tree.clone(params)))
        if log.rows[-1]["aborted"]:
            continue
        drawn.add(len(models))
        new, divisor = tree.clone(session.state.server["local/feddyn"]), 2 if protection is HIDDEN else len(models)
        for name, leaf in session.state.server["params"].items():
            moved = sum((model[name] - before[name] for model in models), torch.zeros_like(before[name]))
            assert torch.allclose(new[name] - h.get(name, 0), -alpha / 4 * moved, atol=1e-8, rtol=0)
            assert torch.allclose(leaf, before[name] + moved / divisor - new[name] / alpha, atol=1e-8, rtol=0)
        h = new
    assert drawn >= {1, 2, 3} and all(float(leaf.abs().max()) > 1e-3 for leaf in h.values())


@pytest.mark.parametrize("options", [("secagg=full",), ("secagg=sum", *CLIENT)], ids="+".join)
def test_small_cohorts_are_aborted_under_secure_aggregation(options):
    """At an expected two of four nobody is drawn in 1/16 of the rounds, one in 4/16; a sum of one is no secret."""
    result, log = run("rounds=8", "cohort=2", "sampling=poisson", *options)
    small = [row for row in log.rows if row["aborted"]]
    assert {row["aborted"][:6] for row in small} == {"0 of 0", "1 of 1"}
    assert all("clients are left after stage keys, 2 are needed" in row["aborted"] for row in small)
    assert len(small) < len(log.rows) == 16
    assert all(bool(leaf.isfinite().all()) for leaf in result.params.values())


@pytest.mark.parametrize("protection", [CLIENT, HIDDEN], ids="+".join)
@pytest.mark.parametrize("method", ["fot", "fot+feddf"])
def test_an_empty_cohort_is_aborted_where_only_work_is_protected(method, protection):
    """Rounds of training release nothing, so that nothing is to be hidden; the teacher of FedDF would be 0 / 0."""
    options = ("rounds=8", *ALONE, *protection, "dp.protect=work", *(PUBLIC if "feddf" in method else ()))
    session, log = session_of(*options, method=method)
    empty = 0
    for position in range(len(session.schedule)):
        before, info = copied({"": session.state.server["params"]}), session.prepare(position).info
        session.round(position)
        if not info.clients:
            empty += 1
            assert log.rows[-1]["aborted"] == "no client of the cohort has answered" and info.phase.name == "train"
            assert same(before, {"": session.state.server["params"]}), info.place
    assert empty == len(log.warnings) > 0
    assert all(bool(leaf.isfinite().all()) for leaf in session.state.server["params"].values())


def test_an_empty_cohort_may_meet_the_sketches():
    """With seed 3 nobody is drawn to sketch the inputs of the first task: the server gets noise alone."""
    options = ("rounds=1", "seed=3", *ALONE, *HIDDEN, "strategy.participants=sampled")
    result, log = run(*options, method="fot")
    assert [row["clients"] for row in log.rows if row["phase"] == "gpse"] == [0]
    assert all(bool(leaf.isfinite().all()) for leaf in result.params.values())


class Later(FOT):
    """Has all clients sketch in the first task, and a draw of them from then on."""

    def plan(self, task, tasks, rounds):
        phases = super().plan(task, tasks, rounds)
        return [replace(phase, cohort="sampled") if phase.name == "gpse" and task else phase for phase in phases]


def test_the_rules_of_sampling_hold_for_tasks_to_come():
    """Of three tasks the first two are sketched; of two only the first."""
    options, fixed = ("tasks=3", "dp.protect=work"), (*CLIENT[:3], "sampling=fixed", "dp.amplify=true")
    with pytest.raises(ConfigError, match="^sampling=fixed has no bound in the accountants.*; set sampling=poisson"):
        session_of(*options, *fixed, method="fot", strategy=Later())
    for more in (HIDDEN, (*fixed, "dp.amplify=false"), (*fixed, "tasks=2")):
        session, _ = session_of(*options, *more, method="fot", strategy=Later())
        infos = [session.prepare(position).info for position in range(len(session.schedule))]
        hidden = [(info.task, info.phase.name) for info in infos if info.privacy and info.privacy.hidden]
        assert hidden == ([(1, "gpse")] if more is HIDDEN else [])
        assert any(info.phase.diagnostic for info in infos)
        assert all((info.privacy is None) == info.phase.diagnostic for info in infos)  # measured are inputs as they are


@pytest.mark.parametrize("secagg", ["sum", "full"])
def test_a_task_that_one_client_holds_has_no_secure_sum(secagg):
    """A quarter of 4 clients is one."""
    with pytest.raises(ConfigError, match="only one holds data of task 0: raise partition.task_share or set secagg"):
        session_of("partition.task_share=0.25", f"secagg={secagg}")
    session_of("partition.task_share=0.25")
    session_of("partition.task_share=0.5", f"secagg={secagg}")


# --- killed and resumed ----------------------------------------------------------------------------------------------

RESUMED = {
    "drop-outs": (
        ("partition.clients=8", "cohort=6", "local.batch_size=6", "drop_rate=0.3", "secagg=full"),
        "fot+scaffold",
    ),
    "client": ((*CLIENT, "local.momentum=0.9", "local.batch_size=6"), "fot+scaffold"),
    "example": ((*EXAMPLE, *GRAM, "model.dropout=[0.2,0.2]"), "fot"),
}
ROUNDS = 2 + 1 + 1 + 2  # two tasks of two rounds, the first with gpse and coverage after them


@pytest.mark.parametrize("name", RESUMED)
def test_killed_in_every_round_a_run_ends_with_the_same_bytes(name, tmp_path):
    """Each session dies in the round after the last one that was saved; the next does that round again."""
    options, method = RESUMED[name]
    config, stream = toy.config(*SCHEDULE, *options, method=method), toy.stream(tasks=2)
    whole = cfl.run(config, stream=stream, output=tmp_path / "whole", sink=Log())
    result, kills = None, 0
    while result is None:
        try:
            result = cfl.run(config, stream=stream, output=tmp_path / "killed", resume=kills > 0, sink=Kill(kills + 1))
        except Killed:
            kills += 1
    assert kills == ROUNDS
    assert finished(tmp_path / "killed") == finished(tmp_path / "whole")
    assert same({"": result.params}, {"": whole.params})


# --- what is reported ------------------------------------------------------------------------------------------------

FIGURES = {"epsilon", "epsilon_by_client", "delta", "epsilon_of", "noise_multiplier"}


def test_metrics_tell_what_was_spent(tmp_path):
    """3 of 4 clients a round, 2 tasks of 2 rounds: 4 releases at rate 3/4 for everybody."""
    _, log = run(*CLIENT, "dp.amplify=true", "dp.delta=1e-4", output=tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    spent = epsilon([Releases(0.75, 4)], 1.0, 1e-4, "rdp")
    assert metrics["epsilon"] == pytest.approx(spent)
    assert metrics["epsilon_by_client"] == {str(id): pytest.approx(spent) for id in range(4)}
    assert (metrics["delta"], metrics["noise_multiplier"], metrics["epsilon_of"]) == (1e-4, 1.0, "all uploads")
    assert [row["epsilon"] for row in log.tasks] == [
        pytest.approx(epsilon([Releases(0.75, releases)], 1.0, 1e-4, "rdp")) for releases in (2, 4)
    ]
    assert f"epsilon {spent:.3g} at delta 0.0001 per client over the whole run (noise 1 x clip 1)" in log.notes[-3]
    assert "the noise follows from the seed, so that runs repeat: keep the seed secret" in log.notes[-2]
    assert "epsilon assumes that the cohorts stay secret" in log.notes[-1]


@pytest.mark.parametrize("protection", [(*CLIENT, "secagg=full", "dp.amplify=false"), CLIENT, EXAMPLE])
def test_noise_of_the_systems_entropy_never_repeats_and_costs_the_same(protection):
    seeded, _ = run(*protection)
    (first, log), (again, _) = (run(*protection, "dp.noise_seed=system") for _ in range(2))
    assert farthest(seeded.params, first.params) > 0.01 and farthest(first.params, again.params) > 0.01
    assert first.metrics["epsilon"] == seeded.metrics["epsilon"]
    assert any("system's entropy: the run cannot be repeated" in note for note in log.notes)


def test_poisson_batches_come_from_the_source_of_the_noise():
    """With next to no noise only the batches differ: 12 samples, 4 in a batch on average."""
    quiet = (*(option for option in EXAMPLE if "noise" not in option), "dp.noise_multiplier=1e-6", "dp.clip=1e3")
    first, again = (run(*quiet, "dp.noise_seed=system")[0] for _ in range(2))
    assert farthest(first.params, again.params) > 1e-4 > 10 * farthest(*(run(*quiet)[0].params for _ in range(2)))


def test_metrics_of_samples_tell_each_clients_steps():
    """Every client takes part in all 4 rounds: 12 samples in 3 batches of 4, rate 1/3, make 4 x 3 releases."""
    result, _ = run(*EXAMPLE, "cohort=4", "local.batch_size=4")
    spent = epsilon([Releases(1 / 3, 12)], 1.0, 1e-5, "rdp")
    assert result.metrics["epsilon_by_client"] == {str(id): pytest.approx(spent) for id in range(4)}


def test_the_budget_of_sketches_alone_says_so():
    """One release of all clients, after the first of two tasks."""
    result, log = run(*CLIENT, "dp.protect=work", method="fot")
    assert result.metrics["epsilon"] == pytest.approx(epsilon([Releases(1.0, 1)], 1.0, 1e-5, "rdp"))
    assert result.metrics["epsilon_of"] == "uploads of phases of work alone"
    assert any("updates are NOT protected" in note for note in log.notes)


def test_without_protection_there_is_nothing_to_tell():
    for options in ((), ("secagg=full", "drop_rate=0.1")):
        result, log = run(*options)
        assert not FIGURES & set(result.metrics)
        assert not any("epsilon" in note for note in log.notes) and not any("epsilon" in row for row in log.tasks)


def test_the_noise_is_solved_for_the_budget_and_added():
    """Within 1 % below the target; and with a target so strict the model is mostly noise."""
    options = ("dp.target_epsilon=2", *CLIENT[1:])
    result, _ = run(*options, "seed=1")
    assert 0.99 * 2 <= result.metrics["epsilon"] <= 2
    fixed, _ = run(f"dp.noise_multiplier={result.metrics['noise_multiplier']}", *options[1:], "seed=1")
    assert same({"": fixed.params}, {"": result.params})
    assert fixed.metrics["epsilon"] == result.metrics["epsilon"]


def test_noise_does_not_hang_on_who_was_there():
    """Two runs that differ in the clip alone have the same draws: all steps scale while every upload is clipped."""
    options = ("tasks=1", "rounds=1", *CLIENT, "local.lr=10", "local.batch_size=12")
    steps = {}
    for clip in (1e-3, 2e-3):
        session, log = session_of(*options, f"dp.clip={clip}", module=toy.mlp(8, 6, 2))
        before = tree.clone(session.state.server["params"])
        session.round(0)
        assert log.rows[0]["shortened"] == log.rows[0]["clients"] > 0
        steps[clip] = tree.sub(session.state.server["params"], before)
    assert all(torch.allclose(2 * leaf, steps[2e-3][name], atol=1e-12) for name, leaf in steps[1e-3].items())


COMMAND = ["train", "permuted-digits", "--no-plot", "--set", "tasks=2", "--set", "rounds=1", "--set"]
COMMAND += ["model.hidden=[8]", "--set", "partition.clients=4", "--set", "cohort=2"]
BUDGET = ("dp.target_epsilon=5", "dp.delta=1e-5", "dp.accountant=rdp", "agg.weights=uniform", "sampling=poisson")


def invoke(*args):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(args))
    return stop.value.code


def test_a_budget_on_the_command_line(tmp_path, capsys):
    args = [*COMMAND, *(part for option in BUDGET for part in ("--set", option)), "--output", str(tmp_path)]
    assert invoke(*args) == 0
    metrics, shown = json.loads((tmp_path / "metrics.json").read_text()), capsys.readouterr().out
    assert metrics.keys() >= FIGURES and 4.95 <= metrics["epsilon"] <= 5 and metrics["delta"] == 1e-5
    assert "differential privacy of a client: epsilon 5 at delta 1e-05 per client" in " ".join(shown.split())
    assert "so far" in shown
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all({"dropped", "aborted", "clipped", "shortened"} <= row.keys() for row in rows)


def test_a_budget_that_cannot_be_kept_is_refused_in_one_line(capsys):
    without = [part for option in BUDGET[:4] for part in ("--set", option)]
    assert invoke(*COMMAND, *without) == 2
    assert "set sampling=poisson" in capsys.readouterr().err
