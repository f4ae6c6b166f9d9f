"""Clients: batches and recalled samples. Rounds: invalid phases, and the description of a round."""

import math

import pytest
import torch

import cfl
from cfl.contract import STAGES, Client, Phase, Privacy, RoundInfo, Share
from cfl.core import ConfigError, plugins, rng

# Rows of the client's share of each task, unordered; the share of task 2 is empty.
ROWS = {0: [4, 0, 2], 1: [1, 3, 0, 5], 2: []}
SIZES = {0: 5, 1: 6, 2: 4}


def sample(task, row):
    """A sample of two inputs, unique to its task and row."""
    return [100.0 * task + row, -row]


def client(task=1, now=None):
    """A client of a stream whose task t has samples (100 t + i, -i) with label i mod 3, and one test sample."""
    tasks = []
    for number, size in SIZES.items():
        x = torch.tensor([sample(number, row) for row in range(size)])
        tasks.append((x, torch.arange(size) % 3, x[:1], torch.zeros(1, dtype=torch.int64)))
    parts = [part.train for part in cfl.from_tensors(tasks).tasks]
    shares = {number: Share(parts[number], torch.tensor(rows, dtype=torch.int64)) for number, rows in ROWS.items()}
    return Client(7, shares, task, (task,) if now is None else now)


def first_row(task):
    """Id of a task's first sample. Ids count the train samples and the one test sample of each task in turn."""
    return sum(SIZES[earlier] + 1 for earlier in range(task))


def test_batches_of_one_task_hold_the_clients_rows():
    owner = client()
    batches = list(owner.batches(3))
    assert [len(batch.y) for batch in batches] == [3, 1]  # four samples, the last batch holds the rest
    assert torch.cat([batch.x for batch in batches]).tolist() == [sample(1, row) for row in ROWS[1]]
    assert torch.cat([batch.y for batch in batches]).tolist() == [row % 3 for row in ROWS[1]]
    assert torch.cat([batch.ids for batch in batches]).tolist() == [first_row(1) + row for row in ROWS[1]]
    for batch in batches:
        assert batch.task is None
        assert batch.mask.dtype == batch.x.dtype and batch.mask.tolist() == [1.0] * len(batch.y)


def test_batches_of_one_task_in_a_given_order():
    found = torch.cat([batch.x for batch in client().batches(2, torch.tensor([3, 0, 2, 1]))])
    assert found.tolist() == [sample(1, ROWS[1][i]) for i in (3, 0, 2, 1)]


def test_a_last_single_sample_joins_the_batch_before_on_request():
    owner = client()  # four samples
    sizes = {size: [len(batch.y) for batch in owner.batches(size, together=True)] for size in (2, 3, 4)}
    assert sizes == {2: [2, 2], 3: [4], 4: [4]}
    assert next(owner.batches(3, together=True)).x.tolist() == [sample(1, row) for row in ROWS[1]]
    assert len(list(owner.batches(3, torch.tensor([2]), together=True))) == 1  # nothing before that it could join


@pytest.mark.parametrize("now", [(0, 1), (1, 0), (0, 1, 2)], ids=str)
def test_batches_over_several_tasks_give_every_sample_once_with_its_task(now):
    owner = client(now=now)
    order = torch.tensor([6, 2, 0, 5, 1, 4, 3])
    held = [(task, row) for task in now for row in ROWS[task]]  # seven in all
    for given, expected in ((None, held), (order, [held[i] for i in order])):
        batches = list(owner.batches(3, given))
        assert [len(batch.y) for batch in batches] == [3, 3, 1]
        assert torch.cat([batch.task for batch in batches]).tolist() == [task for task, _ in expected]
        assert torch.cat([batch.x for batch in batches]).tolist() == [sample(*place) for place in expected]
        assert torch.cat([batch.y for batch in batches]).tolist() == [row % 3 for _, row in expected]
        ids = torch.cat([batch.ids for batch in batches]).tolist()
        assert ids == [first_row(task) + row for task, row in expected]
        assert torch.cat([batch.mask for batch in batches]).tolist() == [1.0] * 7


def test_length_and_targets_are_those_of_the_tasks_to_train_on():
    assert len(client()) == 4 and client().targets.tolist() == [1, 0, 0, 2]  # rows 1, 3, 0, 5 modulo 3
    both = client(now=(1, 0))
    assert len(both) == 7 and both.targets.tolist() == [1, 0, 0, 2, 1, 0, 2]  # then rows 4, 0, 2
    assert len(client(task=2)) == 0 and list(client(task=2).targets) == []


def test_recall_keeps_the_order_of_the_places():
    places = torch.tensor([[1, 3], [0, 2], [1, 0], [0, 0], [1, 3]])  # one of them twice
    found = client().recall(places)
    expected = [(1, 5), (0, 2), (1, 1), (0, 4), (1, 5)]  # positions in the share, looked up in ROWS
    assert found.x.tolist() == [sample(*place) for place in expected]
    assert found.y.tolist() == [row % 3 for _, row in expected]
    assert found.ids.tolist() == [first_row(task) + row for task, row in expected]
    assert found.task.tolist() == [1, 0, 1, 0, 1]
    assert found.mask.tolist() == [1.0] * 5 and found.mask.dtype == found.x.dtype


def test_recall_and_batches_give_a_sample_the_same_id():
    owner = client(task=0)
    batch, recalled = next(owner.batches(3)), owner.recall(torch.tensor([[0, 0], [0, 1], [0, 2]]))
    assert torch.equal(batch.ids, recalled.ids) and torch.equal(batch.x, recalled.x)


def test_an_empty_recall_can_be_concatenated_with_any_batch():
    found, batch = client().recall(torch.empty(0, 2, dtype=torch.int64)), next(client().batches(3))
    for name, leaf in found._asdict().items():
        other = getattr(batch, name)
        assert len(leaf) == 0
        assert other is None or torch.equal(torch.cat([other, leaf]), other) and leaf.dtype == other.dtype


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ([], True),
        ([[1, 0], [1, 3]], True),  # the round's task, of which the client holds four samples
        ([[1, 0], [0, 2]], True),  # [0, 2] was in its memory
        ([[0, 1]], False),  # the client's own, but of an earlier task
        ([[1, 0], [1, 4]], False),  # one invalid place is enough
        ([[1, -1]], False),
        ([[2, 0]], False),  # a task whose share is empty
        ([[3, 0]], False),  # an unknown task
        ([[-1, 0]], False),
    ],
    ids=str,
)
def test_a_client_may_store_its_current_data_and_keep_its_memory(places, expected):
    wanted = torch.tensor(places, dtype=torch.int64).reshape(-1, 2)
    assert client(task=1).may_store(wanted, torch.tensor([[0, 2]])) is expected


def test_an_unknown_cohort_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="unknown cohort of phase 'store' 'availble'; did you mean 'available'"):
        Phase("store", cohort="availble")
    with pytest.raises(ConfigError, match="unknown cohort of phase 'store' 'xyz'; known: available, none, sampled"):
        Phase("store", cohort="xyz")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": False}, "phase 'idle' has 1 rounds, cohort=sampled, train=False and work=False"),
        ({"rounds": -1}, "phase 'idle' has -1 rounds, cohort=sampled, train=True and work=False"),
    ],
    ids=str,
)
def test_a_phase_without_training_and_work_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        Phase("idle", **options)


@pytest.mark.parametrize("kind", ["stores", "diagnostic"])
def test_a_phase_whose_uploads_nothing_protects_may_not_train(kind):
    """Its updates would be sent without masks, clip, noise and accounting."""
    with pytest.raises(
        ConfigError, match=f"phase 'idle' has train=True and {kind}=True, .*; set train=False, or {kind}="
    ):
        Phase("idle", work=True, **{kind: True})
    assert getattr(Phase("idle", train=False, work=True, **{kind: True}), kind)


@pytest.mark.parametrize("name", plugins.strategies.names())
def test_no_built_in_plan_has_a_phase_that_trains_without_protection(name):
    strategy = plugins.strategies.get(name)()
    phases = [phase for task in range(3) for phase in strategy.plan(task, 3, 2)]
    assert phases and not any(phase.train and (phase.stores or phase.diagnostic) for phase in phases)


def test_phases_may_train_work_or_both():
    assert [(phase.train, phase.work) for phase in (Phase("a"), Phase("b", train=False, work=True))] == [
        (True, False),
        (False, True),
    ]
    both = Phase("c", work=True, rounds=0)  # a plan may have a phase of no rounds
    assert (both.train, both.work, both.rounds, both.cohort, both.diagnostic) == (True, True, 0, "sampled", False)


# --- Poisson batches ------------------------------------------------------------------------------------------------


def many(count=50, now=(0,)):
    """A client that holds `count` samples of each of two tasks."""
    tasks = []
    for number in range(2):
        x = torch.tensor([sample(number, row) for row in range(count)])
        tasks.append((x, torch.arange(count) % 3, x[:1], torch.zeros(1, dtype=torch.int64)))
    parts = [part.train for part in cfl.from_tensors(tasks).tasks]
    return Client(7, {number: Share(parts[number], torch.arange(count)) for number in range(2)}, 1, now)


def drawn(owner, size, steps, seed=0):
    """How often each sample is in each batch: (steps, samples)."""
    places = {int(id): place for place, id in enumerate(next(owner.batches(len(owner))).ids)}
    inside = torch.zeros(steps, len(owner))
    for step, batch in enumerate(owner.gathered(owner.draws(size, steps, rng.private_generator(seed)))):
        for id, there in zip(batch.ids.tolist(), batch.mask.tolist(), strict=True):
            inside[step, places[id]] += there
    return inside


def test_poisson_batches_take_each_sample_at_the_rate_and_independently():
    steps, rate = 2000, 10 / 50
    inside = drawn(many(now=(1,)), 10, steps)
    assert set(inside.unique().tolist()) == {0.0, 1.0}  # no sample twice
    spread = math.sqrt(rate * (1 - rate))
    assert inside.mean() == pytest.approx(rate, abs=4 * spread / math.sqrt(steps * 50))
    assert (inside.mean(0) - rate).abs().max() < 4.5 * spread / math.sqrt(steps)  # each of 50
    # independent within a batch: the size has the variance of a binomial, 8, with an error of sqrt(2 / 2000) = 3 %
    assert inside.sum(1).var() == pytest.approx(50 * rate * (1 - rate), rel=0.13)
    # independent from step to step: correlations are 0 with a standard error of 1 / sqrt(2000 x 50)
    z = (inside - rate) / spread
    for lag in (1, 2):
        assert abs((z[lag:] * z[:-lag]).mean()) < 4 / math.sqrt(steps * 50)


def test_poisson_batches_depend_on_their_generator_alone():
    first, again, other = (drawn(many(now=(1,)), 10, 20, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_an_empty_draw_gives_one_padding_sample():
    batches = list(client().gathered(client().draws(1, 200, rng.private_generator(0))))  # four samples, each at 1/4
    empty = [batch for batch in batches if not batch.mask.any()]
    # (3/4)^4 = 0.316 of 200 draws, with a standard deviation of 6.6
    assert abs(len(empty) - 200 * 0.75**4) < 4 * math.sqrt(200 * 0.75**4 * (1 - 0.75**4))
    for batch in empty:
        assert batch.mask.tolist() == [0.0] and batch.mask.dtype == batch.x.dtype
        assert (batch.x.shape, batch.y.shape, batch.ids.shape) == ((1, 2), (1,), (1,))
    assert all(batch.mask.all() for batch in batches if batch.mask.any())


def test_a_batch_size_of_at_least_the_data_takes_every_sample():
    for size in (4, 9):
        assert all(
            len(batch.y) == 4 and batch.mask.all()
            for batch in client().gathered(client().draws(size, 5, rng.private_generator(0)))
        )


def test_poisson_batches_over_several_tasks_draw_from_all():
    owner = many(now=(0, 1))
    inside = drawn(owner, 10, 1000)
    rate = 10 / 100  # of the samples of all tasks
    assert inside.shape == (1000, 100)
    for half in (inside[:, :50], inside[:, 50:]):
        assert half.mean() == pytest.approx(rate, abs=4 * math.sqrt(rate * (1 - rate) / half.numel()))
    for batch in owner.gathered(owner.draws(10, 50, rng.private_generator(0))):
        assert torch.equal(batch.task, (batch.x[:, 0] >= 100).long())  # see `sample`
        assert batch.x[:, 1].tolist() == [-(int(x) % 100) for x in batch.x[:, 0]]


@pytest.mark.parametrize(("size", "steps"), [(1, 4), (3, 2), (4, 1), (9, 1)])
def test_steps_of_an_epoch_are_its_batches(size, steps):
    assert client().steps(size) == steps == len(list(client().batches(size)))
    assert client(now=(0, 1)).steps(size) == len(list(client(now=(0, 1)).batches(size)))


# --- rounds ---------------------------------------------------------------------------------------------------------


def round_of(**more):
    return RoundInfo(
        task=1, tasks=3, phase=Phase("train"), round=2, clients=(0, 3, 5, 8), names=(), frozen=frozenset(), heads=(1,),
        population=9, lr=0.1, model=None, key=0, **more,
    )  # fmt: skip


def test_clients_that_drop_out_after_their_upload_count_as_uploading():
    assert round_of().uploading == (0, 3, 5, 8)
    dropped = dict(zip((0, 3, 5, 8), STAGES, strict=True))
    assert STAGES[-1] == "unmask" and round_of(dropped=dropped).uploading == (8,)
    assert round_of(dropped={3: "upload"}).uploading == (0, 5, 8)
    assert round_of().place == "task 1, phase train, round 2"


def test_a_round_has_no_privacy_by_default():
    assert round_of().privacy is None
    assert Privacy("client", 2.0) == ("client", 2.0, False, 0.0)
