"""Memory of replay methods: choices by hand and their distributions, and the memory in whole runs."""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cfl
from cfl.contract import EMPTY, MEMORY, Batch, Client, Phase, RoundInfo, Share, with_consolidation
from cfl.core import rng, tree
from cfl.methods.strategies import ER
from cfl.methods.strategies.replay import Replay, balanced
from cfl.runtime.sinks import NullSink
from tests import toy

KINDS = list(itertools.product(("balanced", "reservoir"), ("per_task", "total")))


# --- helpers ---------------------------------------------------------------------------------------------------------


def holder(*labels, id=0):
    """The client in each task, by task: it holds all samples of the tasks so far, with labels labels[t] in task t."""
    one = torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)
    stream = cfl.from_tensors([(torch.zeros(len(y), 1), torch.tensor(y), *one) for y in labels])
    shares = {task: Share(part.train, torch.arange(len(part.train))) for task, part in enumerate(stream.tasks)}
    return [Client(id, {held: shares[held] for held in range(task + 1)}, task, (task,)) for task in range(len(stream))]


def stored(strategy, clients, key=1):
    """The client's state after each task."""
    states, state = [], {}
    for client in clients:
        phase, model = Phase("consolidate", train=False, work=True), SimpleNamespace(seed=key)
        info = RoundInfo(
            client.task, 9, phase, 0, (client.id,), (), frozenset(), (), 9, 0.1, model, rng.key(key, client.task)
        )
        up, state = strategy.work({}, client, {}, state, info)
        assert up == {}  # no upload
        states.append(state)
    return states


def groups(memory, labels):
    """Number of samples in the memory by (task, class)."""
    return Counter((task, labels[task][position]) for task, position in memory.tolist())


@dataclass(frozen=True)
class Recorder(ER):
    """ER that stores after the last task, too, and records the arguments of its hooks."""

    work_calls: list = field(default_factory=list, repr=False)
    steps: list = field(default_factory=list, repr=False)

    def plan(self, task, tasks, rounds):
        return with_consolidation(task, tasks + 1, rounds)

    def work(self, params, client, shared, state, info):
        up, new = super().work(params, client, shared, state, info)
        self.work_calls.append((info.task, client, state, new))
        return up, new

    def augment(self, batch, ctx):
        self.steps.append((ctx.task, batch.ids.tolist(), ctx.memory.ids.tolist()))
        return super().augment(batch, ctx)


def record(*overrides, stream=None, **options):
    recorder = Recorder(**options)
    result = cfl.run(toy.config(*overrides, method="er"), stream=stream or toy.stream(), strategy=recorder)
    return recorder, result


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_balanced_order_by_hand():
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    # one member of each group, then the second members, then the third
    assert balanced(labels, torch.arange(6)).tolist() == [0, 3, 5, 1, 4, 2]
    # the groups come in the order of their first members: 5 of group 2, 4 of group 1, 2 of group 0
    assert balanced(labels, torch.arange(6).flip(0)).tolist() == [5, 4, 2, 3, 1, 0]


def test_replayed_samples_join_behind_the_batch_with_their_tasks():
    new = Batch(torch.ones(2, 3), torch.tensor([1, 0]), torch.tensor([1.0, 0.0]), torch.tensor([8, 9]))
    old = Batch(torch.zeros(1, 3), torch.tensor([1]), torch.ones(1), torch.tensor([4]), torch.tensor([0]))
    joined = Replay().augment(new, toy.context({}, {}, new, task=2, memory=old))
    assert joined.x.tolist() == [[1.0] * 3, [1.0] * 3, [0.0] * 3]
    assert (joined.y.tolist(), joined.mask.tolist()) == ([1, 0, 1], [1.0, 0.0, 1.0])
    assert (joined.ids.tolist(), joined.task.tolist()) == ([8, 9, 4], [2, 2, 0])


def test_with_nothing_to_replay_the_batch_is_the_same_object():
    new = Batch(torch.ones(2, 3), torch.tensor([1, 0]), torch.ones(2), torch.tensor([8, 9]))
    assert Replay().augment(new, toy.context({}, {}, new, memory=EMPTY)) is new


def test_plan_and_heads():
    assert [phase.name for phase in Replay().plan(0, 2, 5)] == ["train", "consolidate"]
    assert [phase.name for phase in Replay().plan(1, 2, 5)] == ["train"]  # no later task replays
    store = Replay().plan(0, 2, 5)[1]
    assert (store.rounds, store.cohort, store.train, store.work) == (1, "available", False, True)
    assert Replay().heads(2, 5) == (0, 1, 2)


# --- limit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("select", "budget"), KINDS)
def test_more_room_than_samples_keeps_all(select, budget):
    labels = ([0, 1, 1, 0], [1, 1, 0])
    first, second = stored(Replay(memory=7, select=select, budget=budget), holder(*labels))
    everything = [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2]]
    assert sorted(first[MEMORY].tolist()) == everything[:4]
    assert sorted(second[MEMORY].tolist()) == everything


@pytest.mark.parametrize(("select", "budget"), KINDS)
def test_no_room_keeps_nothing(select, budget):
    for state in stored(Replay(memory=0, select=select, budget=budget), holder([0, 1, 1, 0], [1, 1, 0])):
        assert state[MEMORY].shape == (0, 2) and state[MEMORY].dtype == torch.int64


# --- property --------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=14), st.randoms(use_true_random=False))
def test_every_prefix_is_balanced_and_groups_keep_their_order(labels, shuffle):
    order = list(range(len(labels)))
    shuffle.shuffle(order)
    found = balanced(torch.tensor(labels, dtype=torch.int64), torch.tensor(order, dtype=torch.int64)).tolist()
    assert sorted(found) == sorted(order)
    total = Counter(labels)
    for group in total:
        assert [i for i in found if labels[i] == group] == [i for i in order if labels[i] == group]
    for length in range(len(labels) + 1):
        prefix = Counter(labels[i] for i in found[:length])
        for group, most in total.items():  # a group falls behind by two only if it has no more members
            assert prefix[group] == most or prefix[group] >= max(prefix.values(), default=0) - 1


@pytest.mark.parametrize("select", ["balanced", "reservoir"])
def test_per_task_stores_as_many_of_each_task_and_leaves_the_earlier_ones(select):
    labels = ([0, 1] * 5, [0, 1, 1], [1] * 8)
    states = stored(Replay(memory=4, select=select), holder(*labels))
    for task, state in enumerate(states):
        counts = [int((state[MEMORY][:, 0] == seen).sum()) for seen in range(task + 1)]
        assert counts == [4, 3, 4][: task + 1]  # the second task has only three samples
        assert len(state[MEMORY].unique(dim=0)) == len(state[MEMORY])
    for before, after in itertools.pairwise(states):
        assert torch.equal(after[MEMORY][: len(before[MEMORY])], before[MEMORY])


def test_per_task_stores_as_many_of_each_class():
    labels = [0] * 20 + [1] * 3 + [2]  # one of class 2 and two of each other class fill five places
    for key in range(20):
        (state,) = stored(Replay(memory=5), holder(labels), key)
        assert groups(state[MEMORY], [labels]) == {(0, 0): 2, (0, 1): 2, (0, 2): 1}


@pytest.mark.parametrize("memory", range(1, 14))
@pytest.mark.parametrize("select", ["balanced", "reservoir"])
def test_a_total_is_never_exceeded_nor_left_unused(select, memory):
    labels = ([0, 1] * 2, [0, 1, 1], [1] * 4)
    for seen, state in zip((4, 7, 11), stored(Replay(memory=memory, select=select, budget="total"), holder(*labels))):
        assert len(state[MEMORY]) == min(memory, seen) == len(state[MEMORY].unique(dim=0))


@pytest.mark.parametrize("memory", range(1, 14))
def test_a_total_is_spread_over_the_classes_of_each_task(memory):
    labels = ([0, 1, 0, 1, 0, 1], [0, 0, 0, 0, 1], [2, 1, 0] * 2)
    for task, state in enumerate(stored(Replay(memory=memory, budget="total"), holder(*labels))):
        found = groups(state[MEMORY], labels)
        for seen in range(task + 1):
            total = Counter(labels[seen])
            most = max(found[seen, label] for label in total)
            assert all(found[seen, label] in (total[label], most, most - 1) for label in total)


def test_a_total_is_spread_over_the_tasks():
    labels = ([0, 1] * 8, [0, 1] * 8, [0, 1] * 8)
    for memory in range(1, 14):
        for task, state in enumerate(stored(Replay(memory=memory, budget="total"), holder(*labels))):
            counts = [int((state[MEMORY][:, 0] == seen).sum()) for seen in range(task + 1)]
            assert max(counts) - min(counts) <= 1, f"{memory} places after task {task}: {counts}"


def test_a_total_lets_go_of_earlier_samples_and_never_takes_them_back():
    labels = ([0, 1] * 5, [0, 1] * 5, [0, 1] * 5)
    states = stored(Replay(memory=6, budget="total"), holder(*labels))
    sets = [{tuple(place) for place in state[MEMORY].tolist()} for state in states]
    for task, (before, after) in enumerate(itertools.pairwise(sets)):
        assert {place for place in after if place[0] <= task} < before
    assert groups(states[2][MEMORY], labels) == {(task, label): 1 for task in range(3) for label in range(2)}


def bernstein(trials, chance, risk):
    """t such that Bin(trials, chance) deviates from its mean by t or more with a probability of at most `risk`.

    Bernstein's inequality: 2 exp(-t^2 / (2 (v + t / 3))), v = trials chance (1 - chance). Setting it to the risk with
    l = log(2 / risk) gives t^2 - (2 l / 3) t - 2 l v = 0.
    """
    level, variance = math.log(2 / risk), trials * chance * (1 - chance)
    return level / 3 + math.sqrt((level / 3) ** 2 + 2 * level * variance)


@pytest.mark.slow
def test_with_fewer_places_than_tasks_each_task_is_held_with_the_same_chance():
    """Two places. After the third task each of the three tasks has one with chance 2/3, after the fourth with 2/4, at
    one client as at others. Keys are fixed; other draws of a correct method would fail with a chance below 1e-6."""
    labels, trials = ([0, 1], [1], [0, 0, 1], [1, 0]), 1000
    found = [Counter(), Counter()]
    for id in range(trials):
        for counts, state in zip(found, stored(Replay(memory=2, budget="total"), holder(*labels, id=id), id % 2)[2:]):
            counts.update(state[MEMORY][:, 0].tolist())
    for counts, tasks in zip(found, (3, 4)):
        bound = bernstein(trials, 2 / tasks, 1e-6 / 7)
        assert bound < trials / tasks / 2  # the bound is tight enough to be meaningful
        assert all(abs(counts[task] - 2 * trials / tasks) < bound for task in range(tasks)), counts


def test_every_seen_sample_is_in_the_reservoir_with_the_same_chance():
    """Five samples in three tasks, two places: after the last task each of the ten pairs is as likely as another, and
    before it each of the three pairs of the first two tasks. The keys are fixed; other draws of a correct method would
    fail with a chance below 1e-6."""
    clients, trials = holder([0, 0], [1], [0, 1]), 2000
    found = [Counter(), Counter()]
    for key in range(trials):
        _, second, third = stored(Replay(memory=2, select="reservoir", budget="total"), clients, key)
        for counts, state in zip(found, (second, third)):
            counts[tuple(sorted(map(tuple, state[MEMORY].tolist())))] += 1
    for counts, pairs in zip(found, (3, 10)):
        assert len(counts) == pairs
        bound = bernstein(trials, 1 / pairs, 1e-6 / 13)
        assert bound < trials / pairs / 2  # the bound is tight enough to be meaningful
        assert all(abs(count - trials / pairs) < bound for count in counts.values())


@pytest.mark.parametrize("select", ["balanced", "reservoir"])
def test_within_a_task_every_sample_is_stored_with_the_same_chance(select):
    """One of six samples of one class, in 1200 draws; correct draws fail with a probability below 1e-6."""
    clients, trials = holder([0] * 6), 1200
    states = (stored(Replay(memory=1, select=select), clients, key)[0] for key in range(trials))
    counts = Counter(state[MEMORY][0, 1].item() for state in states)
    bound = bernstein(trials, 1 / 6, 1e-6 / 6)
    assert bound < 100
    assert len(counts) == 6 and all(abs(count - 200) < bound for count in counts.values())


@pytest.mark.parametrize(("select", "budget"), KINDS)
def test_all_samples_seen_are_counted_where_chances_depend_on_it(select, budget):
    states = stored(Replay(memory=2, select=select, budget=budget), holder([0] * 4, [0] * 3, [1]))
    counted = (select, budget) == ("reservoir", "total")
    assert [state["seen"].item() for state in states if "seen" in state] == ([4, 7, 8] if counted else [])
    assert all(set(state) == {MEMORY, "seen"} if counted else {MEMORY} for state in states)


# --- conformance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("select", "budget"), KINDS)
def test_what_is_stored_depends_on_key_and_client_and_nothing_else(select, budget):
    strategy, labels = Replay(memory=4, select=select, budget=budget), ([0, 1] * 10, [0, 1] * 10)
    clients, state = holder(*labels), torch.get_rng_state()
    first, second = stored(strategy, clients)
    before = tree.clone(first)
    again = stored(strategy, clients)[1]
    assert torch.equal(second[MEMORY], again[MEMORY])
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is unchanged
    assert all(torch.equal(first[name], leaf) for name, leaf in before.items())  # and so is the given state
    assert not torch.equal(stored(strategy, clients, key=2)[1][MEMORY], second[MEMORY])
    assert not torch.equal(stored(strategy, holder(*labels, id=1))[1][MEMORY], second[MEMORY])


@pytest.mark.parametrize(("select", "budget"), KINDS)
def test_no_client_ever_sees_a_sample_of_another(select, budget):
    # half of the clients own each task, so some have a memory and others do not
    recorder, _ = record("partition.task_share=0.5", "partition.clients=6", memory=2, select=select, budget=budget)
    owner, held = {}, {}
    for task, client, _, new in recorder.work_calls:
        samples, rows = client.shares[task]
        ids = samples.index[rows].tolist()
        assert not owner.keys() & set(ids)
        owner |= dict.fromkeys(ids, client.id)
        held[client.id, task] = set(client.recall(new[MEMORY]).ids.tolist())
        assert {owner[id] for id in held[client.id, task]} == {client.id}
    replayed = 0
    for task, ids, memory in recorder.steps:
        (id,) = {owner[i] for i in ids}
        earlier = [held[id, seen] for seen in range(task) if (id, seen) in held]
        assert set(memory) == (earlier[-1] if earlier else set())  # four samples at most: one batch
        replayed += bool(memory)
    assert 0 < replayed < len(recorder.steps)


def test_replay_draws_at_most_a_batch():
    recorder, _ = record(memory=7)  # batches of four
    assert {(task, len(memory)) for task, _, memory in recorder.steps} == {(0, 0), (1, 4), (2, 4)}


def test_a_client_starts_without_any_state():
    recorder, _ = record("partition.task_share=0.5", "partition.clients=6", memory=2)
    first_calls = {}
    for task, client, state, new in recorder.work_calls:
        tasks_before = {seen for seen, other, _, _ in recorder.work_calls if other.id == client.id and seen < task}
        first_calls.setdefault(client.id, (task, state))
        assert set(new[MEMORY][:, 0].tolist()) == {*tasks_before, task}  # only tasks of which it had data
    assert all(state == {} for _, state in first_calls.values())
    assert {task for task, _ in first_calls.values()} > {0}  # some start later


@pytest.mark.parametrize("method", ["er", "glfc"])
@pytest.mark.parametrize("multi_head", [False, True])
def test_bytes_by_the_shapes(method, multi_head):
    result = cfl.run(toy.config("strategy.memory=3", method=method), stream=toy.stream(multi_head=multi_head))
    # Eight float32 inputs and an int64 label a sample, three samples of each of the first two tasks.
    assert result.metrics["client_bytes"] == result.metrics["client_bytes_max"] == 2 * 3 * (8 * 4 + 8)
    body, head = (8 * 6 + 6) + (6 * 6 + 6), 6 * 2 + 2
    moved = result.metrics["bytes_by_phase"]
    down = [body + (task + 1) * head if multi_head else body + head for task in range(3)]  # all heads so far
    assert moved["consolidate"] == {"up": 0, "down": 4 * 4 * (down[0] + down[1])}  # all four clients, in float32
    # Two rounds of three clients per task; uploads have only the task's own head.
    assert moved["train"] == {"up": 3 * 2 * 3 * 4 * (body + head), "down": 2 * 3 * 4 * sum(down)}


@pytest.mark.parametrize("budget", ["per_task", "total"])
def test_client_bytes_are_the_mean_over_clients(budget):
    options = ("partition.task_share=0.5", "partition.clients=6", "strategy.memory=3")
    recorder = Recorder(memory=3, budget=budget)
    result = cfl.run(toy.config(*options, method="er"), stream=toy.stream(), strategy=recorder)
    last = {client.id: len(new[MEMORY]) * 40 for _, client, _, new in recorder.work_calls}
    assert result.metrics["client_bytes"] == pytest.approx(sum(last.values()) / len(last))
    assert result.metrics["client_bytes_max"] == max(last.values())


class Killed(BaseException):
    """Stand-in for SIGKILL."""


class KillAt(NullSink):
    """Kill a run at the end of a round, before its checkpoint is written."""

    def __init__(self, at):
        self.at = at

    def round(self, row):
        if row["rounds_done"] == self.at:
            raise Killed


WAYS = [("balanced", "per_task"), ("reservoir", "total")]


@pytest.mark.slow
@pytest.mark.parametrize(("select", "budget"), toy.quick(WAYS[0], of=WAYS))
def test_killed_at_any_round_the_memory_and_its_draws_are_the_same(select, budget, tmp_path):
    config = toy.config("local.momentum=0.9", "partition.name=shards", method="er")
    options = dict(memory=6, select=select, budget=budget)  # more than a batch of four, so steps draw from it

    def play(folder, **more):
        recorder = Recorder(**options)
        stream = toy.stream(multi_head=True)
        return recorder, cfl.run(config, stream=stream, strategy=recorder, output=folder, **more)

    reference, result = play(tmp_path / "reference")
    assert len(reference.work_calls) == 3 * 4  # all four clients store after each of the three tasks
    left = []
    for killed_at in range(1, 10):  # each task has two rounds and a consolidation
        with pytest.raises(Killed):
            play(tmp_path / str(killed_at), sink=KillAt(killed_at))
        resumed, again = play(tmp_path / str(killed_at), resume=True)
        assert all(torch.equal(again.params[name], leaf) for name, leaf in result.params.items())
        left.append(len(resumed.steps))
        assert resumed.steps == reference.steps[len(reference.steps) - left[-1] :]
        calls = reference.work_calls[-len(resumed.work_calls) :]
        for (_, ours, before, after), (_, theirs, *expected) in zip(resumed.work_calls, calls, strict=True):
            assert ours.id == theirs.id
            for state, same in zip((before, after), expected, strict=True):
                assert list(state) == list(same)
                assert all(torch.equal(leaf, same[name]) and leaf.dtype == torch.int64 for name, leaf in state.items())
    # A round has three clients with three batches of four: only the killed round is lost.
    assert left == [9 * rounds for rounds in (6, 5, 4, 4, 3, 2, 2, 1, 0)]


@pytest.mark.slow
def test_killed_at_any_round_a_run_of_glfc_ends_with_the_same_bytes(tmp_path):
    config = toy.config("strategy.memory=3", "model.dropout=[0.2,0.2]", method="glfc")

    def play(folder, **more):
        return cfl.run(config, stream=toy.stream(multi_head=True), output=folder, **more)

    reference = play(tmp_path / "reference")
    for killed_at in range(1, 9):  # three tasks of two rounds, and two consolidations
        with pytest.raises(Killed):
            play(tmp_path / str(killed_at), sink=KillAt(killed_at))
        again = play(tmp_path / str(killed_at), resume=True)
        assert all(torch.equal(again.params[name], leaf) for name, leaf in reference.params.items())
        assert again.metrics["accuracy_matrix"] == reference.metrics["accuracy_matrix"]
        assert again.metrics["client_bytes"] == reference.metrics["client_bytes"]
