"""What a run spends of each client's privacy, against what the clients of a real run do, and against counts by hand."""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

import pytest

import cfl
from cfl.aggregation import accounting
from cfl.aggregation.accounting import Releases
from cfl.assembly import methods as members
from cfl.core import plugins
from cfl.runtime.builder import build_session
from cfl.runtime.privacy_budget import Budget
from cfl.runtime.runner import stream_of
from cfl.runtime.sinks import NullSink
from tests import toy

UNIFORM = "agg.weights=uniform"
CLIENT = ("dp.level=client", UNIFORM, "dp.accountant=rdp")
EXAMPLE = ("dp.level=example", UNIFORM, "dp.accountant=rdp")
NOISE = "dp.noise_multiplier=1.0"
LOCAL = ("strategy.model=local", "strategy.participants=sampled")
SUMS = ("strategy.sketch=gram", "strategy.project_at=server")  # what FOT needs at the level of samples


def counting(base):
    """The strategy, with the ids of the clients whose `work` sends, and id to the local steps of those that train."""

    @dataclass(frozen=True)
    class Counting(base):
        per_sample = vars(base).get("per_sample", False)
        sent: list = field(default_factory=list)
        steps: dict = field(default_factory=dict)

        def finish(self, params, ctx, steps):
            self.steps[int(ctx.client)] = steps
            return super().finish(params, ctx, steps)

        def work(self, params, client, shared, state, info):
            up, state = super().work(params, client, shared, state, info)
            if up and not info.phase.diagnostic:
                self.sent.append(client.id)
            return up, state

    return Counting


def session(*overrides, method="fedavg", strategy=None, stream=None):
    config = toy.config(*overrides, method=method)
    made = members.build(config)
    if strategy is not None:
        made["strategy"] = strategy
    return build_session(config, stream or toy.stream(config.tasks or 3), made)


def plan(counts):
    """Counts by rate as the plan of a client."""
    return tuple(Releases(rate, count) for rate, count in sorted(counts.items()))


def observed(run, strategy):
    """Client to its releases so far as its hooks saw them, after each round."""
    dp, local = run.config.dp, run.config.local
    total, history = {}, []
    for position, (task, *_) in enumerate(run.schedule):
        strategy.sent.clear()
        strategy.steps.clear()
        info = run.prepare(position).info
        run.round(position)
        sizes = {id: len(run.population.client(id, task, run.rounds.sees(task))) for id in info.clients}
        for id in info.clients:
            sent, trained = id in strategy.sent, id in strategy.steps and dp.protect == "all"
            own: Counter = Counter()
            if dp.level == "client":
                own[1.0] += int(sent or trained)  # one clip of all that goes up in a round
            else:
                own[min(1.0, local.batch_size / sizes[id])] += strategy.steps.get(id, 0) if trained else 0
                own[1.0] += int(sent)
            if +own:
                total.setdefault(id, Counter()).update(+own)
        history.append({id: plan(counts) for id, counts in sorted(total.items())})
    return history


CASES = {
    "client": ("fedavg", [*CLIENT, NOISE, "dp.amplify=false"]),
    "client, poisson": ("fedavg", [*CLIENT, NOISE, "dp.amplify=false", "sampling=poisson"]),
    "client, cohorts by round": ("fedavg", [*CLIENT, NOISE, "dp.amplify=false", "sampling=round", "cohort=2"]),
    "client, sketches too": ("fot", [*CLIENT, NOISE, "dp.amplify=false"]),
    "client, sketches alone": ("fot", [*CLIENT, NOISE, "dp.amplify=false", "dp.protect=work"]),
    "client, sketches with an update": (
        "fot",
        [*CLIENT, NOISE, "dp.amplify=false", *LOCAL, "strategy.project_at=server"],
    ),
    "client, tasks of half of the clients": (
        "fot",
        [*CLIENT, NOISE, "dp.amplify=false", "partition.clients=6", "partition.task_share=0.5", "cohort=2"],
    ),
    "client, all tasks at once": ("joint", [*CLIENT, NOISE, "dp.amplify=false"]),
    "client, importances that stay": ("ewc", [*CLIENT, NOISE, "dp.amplify=false"]),
    "client, bases that stay": ("gpm", [*CLIENT, NOISE, "dp.amplify=false"]),
    "client, samples that stay": ("er", [*CLIENT, NOISE, "dp.amplify=false"]),
    "example": ("fedavg", [*EXAMPLE, NOISE]),
    "example, several epochs": ("fedavg", [*EXAMPLE, NOISE, "local.epochs=3", "local.batch_size=5", "rounds=1"]),
    "example, uneven clients": ("fedavg", [*EXAMPLE, NOISE, "partition.name=dirichlet", "tasks=2", "cohort=2"]),
    "example, sketches too": ("fot", [*EXAMPLE, NOISE, *SUMS, "rounds=1"]),
    "example, sketches alone": ("fot", [*EXAMPLE, NOISE, *SUMS, "dp.protect=work"]),
    "example, sketches with an update": (
        "fot",
        [*EXAMPLE, NOISE, *SUMS, "rounds=1", *LOCAL],
    ),
}


@pytest.mark.parametrize("case", toy.quick(*[*CASES][::2], of=CASES))
@pytest.mark.filterwarnings("ignore:round aborted", "ignore:the noise hides all")
def test_the_plan_is_what_the_clients_of_a_run_do(case, monkeypatch):
    monkeypatch.setattr(Budget, "so_far", lambda self, rounds: 0.0)  # epsilon takes its time, and is not looked at here
    method, overrides = CASES[case]
    overrides = ["tasks=2", *overrides]
    base = plugins.strategies.get(method)
    config = toy.config(*overrides, method=method)
    strategy = counting(base)(**config.strategy)
    run = session(*overrides, method=method, strategy=strategy)
    history = observed(run, strategy)
    assert history[-1]  # something is spent
    assert run.budget.plans() == history[-1]
    for done, spent in enumerate(history, start=1):
        assert run.budget.plans(done) == spent
    assert run.budget.plans(0) == {}


def by_count(run):
    """Amplified: whoever holds data of a round's tasks might have been drawn, so each of them spends at that rate."""
    spent = {}
    for task, phase, _ in run.schedule:
        released = phase.work or (phase.train and run.config.dp.protect == "all")
        if phase.stores or phase.diagnostic or not released:
            continue
        tasks = run.rounds.sees(task)
        owners = [
            id
            for id in range(run.config.partition.clients)
            if any(len(run.population.deals[t].rows[id]) for t in tasks)
        ]
        rate = min(1.0, run.config.cohort / len(owners)) if phase.cohort == "sampled" else 1.0
        for id in owners:
            spent.setdefault(id, Counter())[rate] += 1
    return {id: plan(counts) for id, counts in sorted(spent.items())}


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("fedavg", []),
        ("fot", []),
        ("fot", ["dp.protect=work"]),
        ("fot", ["dp.protect=work", "strategy.participants=sampled"]),
        ("ewc", []),
        ("joint", []),
        ("fot", ["partition.clients=8", "partition.task_share=0.5"]),
        ("joint", ["partition.clients=8", "partition.task_share=0.25"]),
    ],
    ids=str,
)
def test_the_amplified_plan_is_the_count_over_owners(method, more):
    run = session(*CLIENT, NOISE, "sampling=poisson", *more, method=method)
    assert run.budget.plans() == by_count(run)
    sizes = [sum(release.count for own in run.budget.plans(n).values() for release in own) for n in range(9)]
    assert sizes == sorted(sizes) and sizes[0] == 0


def test_plans_by_hand():
    # 3 tasks of 2 rounds, 3 of 4 clients: 6 releases at 3/4; FOT's clients all send sketches after tasks 0 and 1.
    assert session(*CLIENT, NOISE, "sampling=poisson").budget.plans() == {id: (Releases(0.75, 6),) for id in range(4)}
    assert session(*CLIENT, NOISE, "sampling=poisson", method="fot").budget.plans() == {
        id: (Releases(0.75, 6), Releases(1.0, 2)) for id in range(4)
    }
    # 12 samples a client, 4 a step, 2 epochs: 6 steps at 1/3 a round; all 4 clients in all 6 rounds
    assert session(*EXAMPLE, NOISE, "local.epochs=2", "cohort=4").budget.plans() == {
        id: (Releases(4 / 12, 36),) for id in range(4)
    }
    assert session("secagg=sum").budget.plans() == {}  # no level, no budget


def test_who_drops_out_counts_as_if_it_had_sent():
    plans = [
        session(*CLIENT, NOISE, "dp.amplify=false", *more, method="fot").budget.plans()
        for more in ([], ["drop_rate=0.5"])
    ]
    assert plans[0] == plans[1]


# --- epsilon --------------------------------------------------------------------------------------------------------

SHARED = ("partition.clients=8", "partition.task_share=0.5", "cohort=2", "local.batch_size=5")


def tasks_of(run):
    """Client to the number of tasks of which it holds data."""
    return Counter(id for deal in run.population.deals for id in deal.owners)


@pytest.mark.parametrize(
    "level",
    [[*CLIENT, "sampling=poisson"], [*CLIENT, "dp.amplify=false", "cohort=4"], EXAMPLE],
    ids=["amplified", "in full", "example"],
)
def test_who_holds_more_tasks_spends_more(level):
    # example level: all owners in every round
    more = [*SHARED, *(["cohort=4"] if level is EXAMPLE else []), *level]
    run = session(*more, NOISE)
    tasks, spent = tasks_of(run), run.budget.epsilon()
    assert set(tasks) == set(spent) and len(set(tasks.values())) > 1
    for count in set(tasks.values()):
        of_same = [spent[id] for id in spent if tasks[id] == count]
        assert max(of_same) == pytest.approx(min(of_same))
        assert all(spent[id] > max(of_same) for id in spent if tasks[id] > count)
    assert run.budget.so_far(len(run.schedule)) == max(spent.values())


@pytest.mark.parametrize(
    ("level", "cohort"),
    [([*CLIENT, "sampling=poisson", "tasks=2"], "cohort=3"), ([*EXAMPLE, "rounds=1"], "cohort=4")],
    ids=["client", "example"],
)
def test_epsilon_grows_from_round_to_round_and_task_to_task(level, cohort):
    run = session(*level, NOISE, cohort)
    largest = [run.budget.so_far(done) for done in range(len(run.schedule) + 1)]
    assert largest[0] == 0.0 and largest == sorted(set(largest))  # strictly
    # a stream of one task spends what a longer one has spent by the end of its first
    one = session(*level, NOISE, cohort, "tasks=1")
    assert one.budget.plans() == run.budget.plans(len(one.schedule))


def test_epsilon_is_that_of_the_accountant():
    run = session(*CLIENT, "dp.noise_multiplier=1.3", "dp.delta=1e-3", "sampling=poisson", method="fot")
    expected = accounting.epsilon([Releases(0.75, 6), Releases(1.0, 2)], 1.3, 1e-3, "rdp")
    assert run.budget.multiplier == 1.3
    assert run.budget.epsilon() == {id: pytest.approx(expected) for id in range(4)}


TARGETS = {
    "client": ("fot", 0.7, [*CLIENT, "sampling=poisson"]),
    "client, prv": ("fot", 8.0, ["dp.level=client", UNIFORM, "cohort=4", "tasks=2"]),
    "client, tasks of half": ("fedavg", 8.0, [*CLIENT, "sampling=poisson", *SHARED, "tasks=2", "rounds=1"]),
    "client, in full": ("fedavg", 0.7, [*CLIENT, "dp.amplify=false", *SHARED]),
    "example, uneven": ("fedavg", 8.0, [*EXAMPLE, "partition.name=dirichlet", "tasks=1", "partition.clients=2"]),
    "example, sketches": ("fot", 2.0, [*EXAMPLE, *SUMS, "tasks=2", "rounds=1", "cohort=4"]),
}


@pytest.mark.parametrize("case", toy.quick("client", "client, prv", "example, uneven", of=TARGETS))
def test_a_target_is_kept_by_all_and_nearly_reached_by_the_heaviest(case):
    method, target, overrides = TARGETS[case]
    run = session(*overrides, f"dp.target_epsilon={target}", method=method)
    spent = run.budget.epsilon()
    assert spent and all(0 < value <= target for value in spent.values())
    # the noise is 0.1 % above the least at most; epsilon changes by no more than twice that share at these targets
    assert max(spent.values()) >= 0.99 * target


FULL, PART = (Releases(1.0, 10),), (Releases(0.3, 80),)  # sums of squared rates: 10 and 7.2


def spends(plan, multiplier):
    return accounting.epsilon(plan, multiplier, 1e-5, "rdp")


@pytest.mark.slow
@pytest.mark.parametrize(("target", "heaviest"), [(1.0, 0), (11.7, 1)])
def test_a_target_is_kept_whichever_plan_is_the_heaviest(target, heaviest, monkeypatch):
    """Little noise undoes the amplification by sampling, so the order of two plans turns with the noise."""
    alone = accounting.noise_multiplier(FULL, target, 1e-5, "rdp")
    assert (spends(PART, alone) > target) == (heaviest == 1)
    monkeypatch.setattr(Budget, "plans", lambda self, rounds=None: {0: FULL, 1: PART})
    budget = session(*EXAMPLE, f"dp.target_epsilon={target}").budget
    spent = budget.epsilon()
    assert spent == {0: spends(FULL, budget.multiplier), 1: spends(PART, budget.multiplier)}
    assert spent[1 - heaviest] < spent[heaviest] <= target
    assert spends((FULL, PART)[heaviest], budget.multiplier / 1.002) > target  # the least noise, but for 0.1 % twice


@pytest.mark.parametrize("multiplier", [1.0, 3.0])
def test_what_is_spent_so_far_is_the_largest_epsilon(multiplier, monkeypatch):
    """With little noise, that of the plan whose sum of squared rates is the smaller one."""
    monkeypatch.setattr(Budget, "plans", lambda self, rounds=None: {0: FULL, 1: PART})
    budget = session(*EXAMPLE, f"dp.noise_multiplier={multiplier}").budget
    spent = {plan: spends(plan, multiplier) for plan in (FULL, PART)}
    assert (max(spent, key=spent.get) is FULL) == (multiplier == 3.0)
    budget._known.clear()
    assert budget.so_far(3) == budget.report()["epsilon"] == max(spent.values())


def test_few_of_many_plans_are_computed_for_what_is_spent_so_far(monkeypatch):
    plans = {count: (Releases(0.1, count), Releases(1.0, 1)) for count in range(1, 40)}
    monkeypatch.setattr(Budget, "plans", lambda self, rounds=None: plans)
    budget = session(*EXAMPLE, "dp.noise_multiplier=1.0").budget
    budget._known.clear()
    assert budget.so_far(3) == spends(plans[39], 1.0)  # more releases spend more
    assert 0 < len(budget._known) <= 3


def test_a_target_is_met_within_a_few_solutions(monkeypatch):
    """The plan of the largest sum of squared rates is not that of the largest epsilon."""
    solved = []
    solve = accounting.noise_multiplier
    monkeypatch.setattr(accounting, "noise_multiplier", lambda *args: solved.append(args) or solve(*args))
    monkeypatch.setattr(Budget, "plans", lambda self, rounds=None: {0: FULL, 1: PART})
    for target in (1.0, 20.0):
        budget = session(*EXAMPLE, f"dp.target_epsilon={target}").budget
        assert max(budget.epsilon().values()) <= target
    assert len(solved) <= 4


def test_a_run_tells_after_each_task_what_is_spent_so_far():
    """3 tasks of 2 rounds, all clients in all of them: 2, 4 and 6 releases."""

    class Told(NullSink):
        rows: ClassVar = []

        def task(self, row):
            self.rows.append(row["epsilon"])

    config = toy.config(*CLIENT, NOISE, "cohort=4", method="fedavg")
    result = cfl.run(config, stream=toy.stream(), sink=Told())
    assert Told.rows == [pytest.approx(spends([Releases(1.0, count)], 1.0)) for count in (2, 4, 6)]
    assert Told.rows[-1] == result.metrics["epsilon"]


def test_a_smaller_target_takes_more_noise():
    noises = [session(*CLIENT, "cohort=4", f"dp.target_epsilon={t}").budget.multiplier for t in (0.5, 2, 8)]
    assert noises == sorted(noises, reverse=True) and noises[-1] > 0


@pytest.mark.parametrize("protect", ["all", "work"])
def test_report_and_notes_say_what_is_spent_and_of_what(protect):
    run = session(*CLIENT, NOISE, "sampling=poisson", f"dp.protect={protect}", method="fot")
    report, notes = run.budget.report(), run.budget.notes()
    assert report["epsilon"] == run.budget.so_far(len(run.schedule)) == max(report["epsilon_by_client"].values())
    assert report["epsilon_by_client"] == {str(id): value for id, value in run.budget.epsilon().items()}
    assert (report["delta"], report["noise_multiplier"]) == (1e-5, 1.0)
    assert report["epsilon_of"] == {"all": "all uploads", "work": "uploads of phases of work alone"}[protect]
    assert ("updates are NOT protected" in notes[0]) == (protect == "work")
    spent = f"differential privacy of a client: epsilon {report['epsilon']:.3g} at delta 1e-05 per client over the"
    assert notes[0].startswith(spent) and "(noise 1 x clip 1)" in notes[0]
    assert "the noise follows from the seed" in notes[1] and "keep the seed secret" in notes[1]
    assert "losses, accuracies and other figures of the simulation are not protected" in notes[1]
    if protect == "all":
        assert "cohorts stay secret" in notes[2] and "dp.amplify=false" in notes[2]
    assert len(notes) == (3 if protect == "all" else 2)  # all clients sketch: there is no draw to keep secret
    full = session(*CLIENT, NOISE, "dp.amplify=false", method="fot")
    assert len(full.budget.notes()) == 2  # no secret, no note on it


def test_notes_name_what_is_protected_and_the_span_over_clients():
    """At the level of samples each task of a client is counted by itself; who holds more tasks spends more."""
    run = session(*EXAMPLE, NOISE, *SHARED, "tasks=2", "rounds=1")
    spent = run.budget.epsilon().values()
    span = f"epsilon {min(spent):.3g} to {max(spent):.3g}, by client, at delta 1e-05 per client"
    first, seed = run.budget.notes()  # single samples have no draw of clients to keep secret
    assert first.startswith(f"differential privacy of a sample in each task of a client: {span}")
    assert first.endswith("for all uploads")
    assert "the noise follows from the seed" in seed and min(spent) < 0.99 * max(spent)


def test_a_model_that_the_run_starts_from_is_named(tmp_path):
    cfl.run(toy.config("tasks=1", "rounds=1"), stream=toy.stream(), output=tmp_path)
    private = (*CLIENT, NOISE, "dp.amplify=false")
    own, further = (session(*private, *start).budget.notes() for start in ((), (f"start={tmp_path}",)))
    assert further[:-1] == own and "does not count the training of the model in `start`" in further[-1]


def test_a_tokenizer_that_is_trained_on_the_clients_texts_is_named():
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    private = ["tasks=1", "rounds=1", NOISE, UNIFORM, "dp.amplify=false"]
    trained, given = (cfl.resolve("split-topics", overrides=[*private, *more]) for more in ((), ("text.tokenizer=a",)))
    stream = stream_of(trained, None, download=False, public=False)
    own, other = (build_session(each, stream, members.build(each)).budget.notes() for each in (trained, given))
    assert own[:-1] == other and "does not count a tokenizer that is trained on the clients' texts" in own[-1]


def test_without_a_level_there_is_nothing_to_say():
    run = session()
    assert (run.budget.multiplier, run.budget.report(), run.budget.notes()) == (0.0, {}, [])
    assert run.budget.epsilon() == {} and run.budget.so_far(len(run.schedule)) == 0.0


# --- nothing to spend -----------------------------------------------------------------------------------------------


def test_a_target_where_no_round_releases_anything_needs_no_noise():
    """One client of four a round, drawn independently: with this seed nobody is drawn, and no budget is spent."""
    one = ["tasks=1", "rounds=1", "cohort=1", "sampling=poisson", "dp.amplify=false"]
    seed = next(seed for seed in range(50) if not session(*one, *CLIENT, NOISE, f"seed={seed}").budget.plans())
    budget = session(*one, *CLIENT, "dp.target_epsilon=1.0", f"seed={seed}").budget
    assert (budget.multiplier, budget.epsilon(), budget.so_far(1)) == (0.0, {}, 0.0)


def test_protecting_sketches_in_a_run_without_any_spends_nothing():
    """FOT sends no sketches after the last task, and here the first one is the last."""
    budget = session(*CLIENT, "dp.target_epsilon=1.0", "dp.protect=work", "tasks=1", method="fot").budget
    assert (budget.multiplier, budget.epsilon(), budget.so_far(9)) == (0.0, {}, 0.0)
    assert budget.report()["epsilon"] == 0.0
