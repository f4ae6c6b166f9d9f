"""A client's memory in the engine: draws at each step, and the check that it points to the client's own data."""

import itertools
import math
from dataclasses import dataclass, field

import pytest
import torch

import cfl
from cfl.contract import MEMORY, Client, Phase, RoundInfo, RoundInputs, Share, Strategy
from cfl.contract.composed import ComposedMethod
from cfl.core import UpdateError, optim, rng, tree
from cfl.engines.loop import LoopEngine, recalled
from cfl.models import Model
from cfl.models.mlp import mlp
from tests import toy

STREAM = toy.stream()
STORE = Phase("store", train=False, work=True)


def client(id=3, task=1):
    """A client with twelve rows of each task up to the round's, disjoint from those of other clients."""
    rows = torch.arange(id, 48, 4)
    return Client(id, {held: Share(STREAM.tasks[held].train, rows) for held in range(task + 1)}, task, (task,))


def places(count):
    return torch.stack([torch.zeros(count, dtype=torch.int64), torch.arange(count).flip(0)], dim=1)


def draws(count, most, key=5, steps=4):
    return [batch.ids.tolist() for batch in itertools.islice(recalled(client(), places(count), most, key), steps)]


def test_draws_have_the_given_size_and_no_duplicates():
    for ids in draws(10, 4, steps=20):
        assert len(ids) == 4 == len(set(ids))


@pytest.mark.parametrize("most", [6, 7])
def test_a_memory_that_fits_is_recalled_whole_at_every_step(most):
    expected = client().recall(places(6))
    for batch in itertools.islice(recalled(client(), places(6), most, 5), 3):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(batch, expected, strict=True))


def test_an_empty_memory_recalls_nothing():
    assert all(len(batch.y) == 0 for batch in itertools.islice(recalled(client(), places(0), 4, 5), 3))


def test_draws_depend_on_the_key_and_the_step():
    first, again, other = draws(10, 4), draws(10, 4), draws(10, 4, key=6)
    assert first == again
    assert len({tuple(sorted(ids)) for ids in (*first, *other)}) == 8  # of 210 subsets; the keys are fixed


def test_a_draw_does_not_depend_on_the_draws_before_it():
    key, held = 5, client()
    for step, ids in enumerate(draws(10, 4, key)):
        order = torch.randperm(10, generator=rng.generator(rng.key(key, step)))[:4]
        assert held.recall(places(10)[order]).ids.tolist() == ids


def test_every_sample_is_drawn_with_the_same_probability():
    """Each step draws 3 of 8, so a sample's count is Bin(2000, 3/8). By Hoeffding's inequality a count deviates by more
    than t with probability below 2 exp(-2 t^2 / 2000), and any of the eight by more than 130 below 1e-6."""
    steps, bound = 2000, 130
    assert 8 * 2 * math.exp(-2 * bound**2 / steps) < 1e-6
    counts = torch.tensor(draws(8, 3, steps=steps)).flatten().unique(return_counts=True)[1]
    assert len(counts) == 8
    assert (counts - steps * 3 / 8).abs().max() < bound


# --- through the engine ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Watcher(Strategy):
    """FedAvg that records `ctx.memory` at each step."""

    seen: list = field(default_factory=list, repr=False)

    def augment(self, batch, ctx):
        self.seen.append(ctx.memory)
        return batch


def engine_of(strategy, model=None, epochs=2):
    with rng.fork(1):
        model = model or Model(mlp((8,), 2, hidden=(4,)), (8,), [2, 2, 2], multi_head=False)
    composed = ComposedMethod({"strategy": strategy})
    return LoopEngine(model, composed, optim.sgd(), epochs, 5, weights="samples", on_bad_update="raise")


def play(engine, states, clients, phase=Phase("train"), round=0):
    """One round of task 1 over the clients."""
    model, ids = engine.model, tuple(client.id for client in clients)
    names = model.trainable(1)
    key = rng.key(3, phase.name, round)
    info = RoundInfo(1, 3, phase, round, ids, names, frozenset(), (1,), 9, 0.1, model, key)
    return engine.round(RoundInputs(info, {"params": model.params}, clients, states))


def memories(round=0, ids=(3,), count=10, extra=()):
    strategy = Watcher()
    states = {id: {f"strategy/{MEMORY}": places(count)} for id in (*ids, *extra)}
    play(engine_of(strategy), states, [client(id) for id in sorted((*ids, *extra))], round=round)
    return [memory.ids.tolist() for memory in strategy.seen]


def test_each_step_gets_a_batch_of_the_memory():
    seen = memories()
    assert len(seen) == 2 * 3  # two epochs of twelve samples in batches of five
    assert all(len(set(ids)) == 5 for ids in seen)
    held = set(client().recall(places(10)).ids.tolist())
    assert all(set(ids) <= held for ids in seen)
    assert len({tuple(ids) for ids in seen}) == 6  # each step draws anew


def test_draws_depend_only_on_the_clients_id_and_the_round():
    alone = memories()
    assert memories() == alone
    assert memories(extra=(1,))[6:] == alone  # client 1 trains first and changes no draw
    assert memories(round=1) != alone


def test_a_client_without_a_memory_sees_an_empty_batch():
    strategy = Watcher()
    play(engine_of(strategy), {3: {}}, [client()])
    assert len(strategy.seen) == 6 and all(memory.x.shape == (0, 8) for memory in strategy.seen)


def test_a_leaf_of_a_regularizer_is_not_a_memory():
    strategy = Watcher()
    play(engine_of(strategy), {3: {f"mine/{MEMORY}": places(4)}}, [client()])
    assert all(memory.x.shape == (0, 8) for memory in strategy.seen)


def test_training_does_not_change_the_memory():
    states = {3: {f"strategy/{MEMORY}": places(10)}}
    before = tree.clone(states[3])
    play(engine_of(Watcher()), states, [client()])
    assert torch.equal(states[3][f"strategy/{MEMORY}"], before[f"strategy/{MEMORY}"])


@dataclass(frozen=True)
class Storing(Strategy):
    """Stores the places given at construction."""

    places: list = field(default_factory=list)

    def plan(self, task, tasks, rounds):
        return [*super().plan(task, tasks, rounds), STORE]

    def work(self, params, client, shared, state, info):
        return {}, {MEMORY: torch.tensor(self.places, dtype=torch.int64).reshape(-1, 2)}


@pytest.mark.parametrize(
    "bad", [[1, 12], [1, -1], [2, 0], [-1, 0], [0, 0]], ids=str
)  # task 0 is not in the current data
def test_a_memory_outside_of_the_clients_current_data_is_an_error(bad):
    engine = engine_of(Storing([[1, 0], bad]))
    with pytest.raises(
        UpdateError, match=r"client 3 stores samples that it does not hold \(task 1, phase store, round 0\)"
    ):
        play(engine, {3: {}}, [client()], STORE)


@pytest.mark.parametrize("good", [[], [[1, 0]], [[1, 11], [0, 11]]], ids=str)
def test_a_memory_inside_of_the_clients_data_is_stored(good):
    before = {"mine/a": torch.ones(1), f"strategy/{MEMORY}": torch.tensor([[0, 11]])}
    outcome = play(engine_of(Storing(good)), {3: before}, [client()], STORE)
    stored = outcome.states[3]
    assert stored[f"strategy/{MEMORY}"].dtype == torch.int64 and stored[f"strategy/{MEMORY}"].tolist() == good
    assert "mine/a" in stored  # other owners' states stay


def test_a_run_names_the_first_client_with_a_wrong_memory():
    with pytest.raises(UpdateError, match=r"client 0 stores .*\(task 0, phase store, round 0\)"):
        cfl.run(toy.config(method="fedavg"), stream=toy.stream(), strategy=Storing([[1, 0]]))  # a later task


def test_a_wrong_memory_from_finish_is_an_error():
    """A negative position would index from the end of the client's rows and replay a sample that nobody chose."""

    class Finishing(Storing):
        def finish(self, params, ctx, steps):
            return super().finish(params, ctx, steps)[0], {MEMORY: torch.tensor([[0, -1]])}

    with pytest.raises(UpdateError, match="client 3 stores samples that it does not hold"):
        play(engine_of(Finishing()), {3: {}}, [client()])
