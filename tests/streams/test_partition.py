"""Dealing a task's samples to clients."""

import dataclasses
import math

import numpy as np
import pytest
import torch

import cfl
from cfl.core import ConfigError, DataError, rng
from cfl.runtime.population import Population
from cfl.streams import deal, from_tensors, partition
from cfl.streams.validation import held_out

CIFAR_TASK = torch.arange(10).repeat(500)  # the labels of one task of split-cifar100: 10 classes x 500, mixed


def _dealt(result):
    return torch.cat(result.rows)


def test_iid_deals_equal_disjoint_shares():
    targets = torch.zeros(103, dtype=torch.int64)
    result = deal(targets, 0, name="iid", clients=10, seed=0)
    assert [len(rows) for rows in result.rows] == [10] * 10  # floor(103 / 10); three samples are dropped
    assert len(_dealt(result).unique()) == 100 and _dealt(result).max() < 103
    assert result.owners == tuple(range(10))


def test_iid_clients_see_all_classes_about_equally():
    result = deal(CIFAR_TASK, 0, name="iid", clients=5, seed=0)
    for rows in result.rows:
        # 1,000 of 5,000 samples without replacement: hypergeometric, mean 100 and std sqrt(100 * .9 * .8) = 8.5 a class
        assert (CIFAR_TASK[rows].bincount(minlength=10) - 100).abs().max() < 5 * 8.5


def test_shards_give_at_most_two_classes_and_paper_sizes():
    result = deal(CIFAR_TASK, 0, name="shards", clients=50, seed=0)
    assert [len(rows) for rows in result.rows] == [100] * 50
    assert len(_dealt(result).unique()) == 5000
    # a shard has 5000 / 100 = 50 samples, which divides the 500 of a class: no shard straddles classes
    counts = [len(CIFAR_TASK[rows].unique()) for rows in result.rows]
    assert max(counts) == 2
    for rows in result.rows:
        assert set(CIFAR_TASK[rows].bincount().tolist()) <= {0, 50, 100}


def test_shards_are_runs_of_the_stably_sorted_samples():
    targets = torch.tensor([1, 0, 1, 0, 1, 0, 1, 0, 1])  # sorted: rows 1 3 5 7 | 0 2 4 6 8; shards of floor(9 / 4) = 2
    result = deal(targets, 3, name="shards", clients=2, seed=5)
    shards = [{1, 3}, {5, 7}, {0, 2}, {4, 6}]
    for rows in result.rows:
        assert sum(shard <= set(rows.tolist()) for shard in shards) == 2 and len(rows) == 4
    assert sorted(_dealt(result).tolist()) == list(range(8))


def test_dirichlet_deals_every_sample_once():
    for alpha in (0.1, 0.5, 100.0):
        result = deal(CIFAR_TASK, 0, name="dirichlet", clients=20, alpha=alpha, seed=0)
        assert torch.equal(_dealt(result).sort().values, torch.arange(5000))


def test_dirichlet_with_large_alpha_is_even_and_with_small_alpha_is_not():
    even = deal(CIFAR_TASK, 0, name="dirichlet", clients=10, alpha=1e6, seed=0)
    # shares are 1/10 with a std of 1e-4.5: 50 of each class's 500, give or take the rounding of two cuts
    for rows in even.rows:
        assert (CIFAR_TASK[rows].bincount(minlength=10) - 50).abs().max() <= 1
    uneven = deal(CIFAR_TASK, 0, name="dirichlet", clients=10, alpha=1e-3, seed=0)
    # Dir(0.001) puts nearly all of a class on one client
    largest = torch.stack([CIFAR_TASK[rows].bincount(minlength=10) for rows in uneven.rows]).max(0).values
    assert (largest > 450).sum() >= 8


def test_dirichlet_may_leave_clients_without_samples():
    result = deal(CIFAR_TASK, 0, name="dirichlet", clients=500, alpha=1e-3, seed=1)
    assert len(_dealt(result)) == 5000
    assert 0 < len(result.owners) < 500
    assert result.owners == tuple(client for client, rows in enumerate(result.rows) if len(rows))


def test_task_share_draws_exactly_that_many_owners_for_each_task():
    owned = torch.zeros(83)
    drawn = set()
    for task in range(40):
        result = deal(CIFAR_TASK, task, name="shards", clients=83, task_share=0.6, seed=0)
        assert len(result.owners) == 50  # round(83 * 0.6) = round(49.8)
        assert all(len(result.rows[client]) == 100 for client in result.owners)
        owned[list(result.owners)] += 1 / 40
        drawn.add(result.owners)
    assert len(drawn) == 40
    assert abs(owned.mean().item() - 0.60) < 0.02
    # ownership of one client is binomial (40, 50/83): std 0.077; 83 clients stay within 5 of them
    assert (owned - 50 / 83).abs().max() < 5 * 0.077


def test_sharding_deals_every_sample_in_shards_of_one_class():
    # 20 x 2 = 40 shards, 4 of each of 10 classes of 500: 125 samples a shard
    result = deal(CIFAR_TASK, 0, name="sharding", clients=20, shards=2, seed=0)
    assert torch.equal(_dealt(result).sort().values, torch.arange(5000))
    for rows in result.rows:
        counts = CIFAR_TASK[rows].bincount(minlength=10)
        assert len(rows) == 250 and set(counts.tolist()) <= {0, 125, 250}


def test_sharding_never_mixes_classes_where_shards_does():
    targets = torch.tensor([0] * 5 + [1] * 5)  # five pieces: 2 2 2 2 2 of the sorted ones, or 2 2 1 and 3 2
    runs = deal(targets, 0, name="shards", clients=5, shards=1, seed=0)
    assert sorted(targets[rows].tolist() for rows in runs.rows) == [[0, 0], [0, 0], [0, 1], [1, 1], [1, 1]]
    pure = deal(targets, 0, name="sharding", clients=5, shards=1, seed=0)
    assert sorted(targets[rows].tolist() for rows in pure.rows) == [[0], [0, 0], [0, 0], [1, 1], [1, 1, 1]]


def test_sharding_pieces_of_a_class_differ_by_a_sample_at_most():
    # 4 clients x 2 shards of 3 classes: 3, 3 and 2 of each, of 2 2 2, 4 3 3 and 2 2 samples
    targets = torch.tensor([0] * 6 + [1] * 10 + [2] * 4)
    counts = [
        tuple(targets[rows].bincount(minlength=3).tolist())
        for seed in range(20)
        for rows in deal(targets, 0, name="sharding", clients=4, seed=seed).rows
    ]
    pieces = [(2, 0, 0), (0, 4, 0), (0, 3, 0), (0, 0, 2)]
    sums = {tuple(np.add(a, b)) for a in pieces for b in pieces}
    assert set(counts) <= sums and len(set(counts)) > 6


def test_sharding_gives_the_first_classes_the_remaining_shards():
    # FedSOL's PathMNIST: 200 clients x 2 = 400 shards of 9 classes, 44 each and one more for the first 4
    targets = torch.arange(9).repeat_interleave(990)
    result = deal(targets, 0, name="sharding", clients=200, seed=0)
    shards = torch.zeros(9)
    for rows in result.rows:
        for label, count in enumerate(targets[rows].bincount(minlength=9).tolist()):
            size = 990 / (45 if label < 4 else 44)  # 22 samples, or 22 and 23
            shards[label] += round(count / size)
            assert abs(count - round(count / size) * size) <= 2
    assert shards.tolist() == [45] * 4 + [44] * 5
    assert len(_dealt(result).unique()) == 9 * 990


def test_sharding_with_too_few_samples_of_a_class():
    targets = torch.tensor([0] * 50 + [4] * 3)
    with pytest.raises(DataError, match="5 x 2 shards are 5 of class 4, which has 3 samples; lower partition.shards"):
        deal(targets, 0, name="sharding", clients=5, seed=0)
    with pytest.raises(DataError, match="2 x 2 shards are 0 of class 4, .*; raise partition.shards"):
        deal(torch.arange(10), 0, name="sharding", clients=2, seed=0)


@pytest.mark.parametrize("alpha", [0.1, 0.3, 100.0])
def test_lda_deals_every_sample_once_within_cap_and_minimum(alpha):
    targets = torch.arange(10).repeat(1000)
    result = deal(targets, 0, name="lda", clients=40, alpha=alpha, min_samples=15, seed=0)
    assert torch.equal(_dealt(result).sort().values, torch.arange(10000))
    assert min(len(rows) for rows in result.rows) >= 15
    for rows in result.rows:
        held = 0
        for count in targets[rows].bincount(minlength=10).tolist():  # classes are dealt in this order
            assert held < 250 or count == 0  # 10000 / 40
            held += count


def test_lda_of_one_class_is_dirichlet():
    """The cap acts from the second class on, so a single class has the sizes of plain Dirichlet shares."""
    targets = torch.zeros(900, dtype=torch.int64)
    sizes = np.array(
        [
            [len(rows) for rows in deal(targets, task, name="lda", clients=3, alpha=2.0, min_samples=1, seed=0).rows]
            for task in range(400)
        ]
    )
    # a share of Dir(2, 2, 2) has mean 1/3 and variance 1/3 * 2/3 / 7; the mean of 400 has a std of .178 / 20
    assert np.abs(sizes.mean(0) / 900 - 1 / 3).max() < 5 * 0.178 / 20
    assert sizes.std(0) / 900 == pytest.approx([math.sqrt(2 / 63)] * 3, rel=0.15)  # a std's own is 1 / sqrt(800)


def test_lda_gives_an_owner_at_the_cap_nothing_of_later_classes():
    # class 0 has 90 of 100 samples: with alpha 1e-3 nearly all go to one owner, which then has more than 100 / 2
    targets = torch.tensor([0] * 90 + [1] * 10)
    for seed in range(20):
        result = deal(targets, 0, name="lda", clients=2, alpha=1e-3, min_samples=10, seed=seed)
        assert sorted(targets[rows].bincount(minlength=2).tolist() for rows in result.rows) == [[0, 10], [90, 0]]


@pytest.mark.parametrize("least", [10, 20])
def test_lda_of_tiny_alpha_deals_whole_classes_and_keeps_none_back(least):
    """Class 0 goes to one owner, which is then at the cap of 40 / 2, so that the other gets both other classes.

    In some draws its share of a class underflows to 0; they are repeated.
    """
    targets = torch.tensor([0] * 20 + [1] * 10 + [2] * 10)
    for seed in range(20):
        result = deal(targets, 0, name="lda", clients=2, alpha=1e-300, min_samples=least, seed=seed)
        assert sorted(targets[rows].bincount(minlength=3).tolist() for rows in result.rows) == [[0, 10, 10], [20, 0, 0]]


def test_lda_always_ends(monkeypatch):
    monkeypatch.setattr(partition, "_REDRAWS", 1000)  # a minute's worth otherwise
    monkeypatch.setattr(partition, "_LONG", 100)
    y = torch.zeros(99, dtype=torch.int64)
    with pytest.raises(DataError, match="99 samples do not give each of 10 owners 10 with alpha 0.5; lower"):
        deal(y, 0, name="lda", clients=10, seed=0)  # 10 x 10 > 99: no draw is tried
    with (
        pytest.warns(UserWarning, match=r"none of 100 draws .* each of 9 clients 10 samples; up to 900 more follow"),
        pytest.raises(DataError, match=r"1,000 draws; lower partition\.min_samples .*raise partition\.alpha"),
    ):
        deal(y, 0, name="lda", clients=9, alpha=0.01, seed=0)  # nearly all of the one class goes to one owner
    with pytest.raises(DataError, match="10 with alpha 1e-300; lower"):  # one owner gets the class: no draw is tried
        deal(y, 0, name="lda", clients=9, alpha=1e-300, seed=0)
    with pytest.raises(ConfigError, match="min_samples must be positive, not 0"):
        deal(y, 0, name="lda", clients=9, min_samples=0, seed=0)


def test_classes_give_each_client_a_class():
    targets = torch.tensor([2, 0, 1, 1, 0, 2, 2])
    result = deal(targets, 0, name="classes", clients=3, seed=0)
    assert [rows.tolist() for rows in result.rows] == [[1, 4], [2, 3], [0, 5, 6]]
    with pytest.raises(ConfigError, match="a client for each of the 3 classes, not 4; set partition.clients to 3"):
        deal(targets, 0, name="classes", clients=4, seed=0)
    with pytest.raises(ConfigError, match="not 2"):  # half of four clients own the task
        deal(targets, 0, name="classes", clients=4, task_share=0.5, seed=0)


def test_partitions_of_stored_results_do_not_change():
    """Stored results depend on these draws, recorded before `sharding`, `lda` and `classes` were added."""
    wanted = {
        "iid": [[0, 1, 7, 8], [2, 3, 5, 11], [4, 6, 9, 10]],
        "shards": [[0, 1, 4, 8], [2, 3, 6, 10], [5, 7, 9, 11]],
        "dirichlet": [[2, 3, 4, 6], [1, 8], [0, 5, 7, 9, 10, 11]],
    }
    for name, rows in wanted.items():
        result = deal(torch.arange(4).repeat(3), 2, name=name, clients=3, seed=7)
        assert [part.tolist() for part in result.rows] == rows


@pytest.mark.parametrize("name", ["iid", "shards", "dirichlet", "sharding", "lda"])
def test_draws_depend_on_seed_and_task_only(name):
    def rows(task, seed):
        torch.manual_seed(task + seed)
        np.random.seed(task + seed)
        return [part.tolist() for part in deal(CIFAR_TASK, task, name=name, clients=20, seed=seed).rows]

    first = rows(2, 7)
    assert rows(3, 7) != first and rows(2, 8) != first
    assert rows(2, 7) == first


def test_test_samples_are_not_dealt():
    x, y = torch.arange(40.0).view(20, 2), torch.arange(20) % 2
    stream = from_tensors([(x, y, x + 100, y)])
    before = stream.tasks[0].test.gather(torch.arange(20))
    result = deal(stream.tasks[0].train.targets, 0, name="dirichlet", clients=4, seed=0)
    ids = stream.tasks[0].train.index[_dealt(result)]
    assert not set(ids.tolist()) & set(stream.tasks[0].test.index.tolist())
    assert all(torch.equal(a, b) for a, b in zip(before, stream.tasks[0].test.gather(torch.arange(20)), strict=True))


def test_errors_name_the_numbers():
    y = torch.zeros(9, dtype=torch.int64)
    with pytest.raises(DataError, match="9 samples cannot be dealt to 10 owners"):
        deal(y, 0, name="iid", clients=10, seed=0)
    with pytest.raises(DataError, match="5 x 2 = 10 shards"):
        deal(y, 0, name="shards", clients=5, seed=0)
    with pytest.raises(ConfigError, match="did you mean 'dirichlet'"):
        deal(y, 0, name="dirichle", clients=5, seed=0)
    for bad in ({"alpha": 0.0}, {"alpha": float("nan")}, {"task_share": 1.5}, {"task_share": 0.0}, {"shards": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            deal(y, 0, name="dirichlet", clients=5, seed=0, **bad)
    with pytest.raises(ConfigError, match="no owner"):
        deal(y, 0, name="iid", clients=4, task_share=0.1, seed=0)


def pieces_one_by_one(name, y, owners, draws):
    """Positions of each owner's samples from the same draws, in a list for each owner."""
    n, labels = len(y), np.unique(y)
    if name == "iid":
        order, size = draws.permutation(n), n // owners
        return [order[i * size : (i + 1) * size] for i in range(owners)]
    if name == "shards":
        size = n // (2 * owners)
        cut = np.argsort(y, kind="stable")[: 2 * owners * size].reshape(-1, size)
        order = draws.permutation(2 * owners)
        return [np.concatenate([cut[order[2 * i]], cut[order[2 * i + 1]]]) for i in range(owners)]
    if name == "sharding":
        least, more = divmod(2 * owners, len(labels))
        cut = [p for k, c in enumerate(labels) for p in np.array_split(np.flatnonzero(y == c), least + (k < more))]
        order = draws.permutation(2 * owners)
        return [np.concatenate([cut[order[2 * i]], cut[order[2 * i + 1]]]) for i in range(owners)]
    found = [[] for _ in range(owners)]
    for label in labels:
        positions = draws.permutation(np.flatnonzero(y == label))
        edges = np.floor(np.minimum(np.cumsum(draws.dirichlet(np.full(owners, 0.5))), 1) * len(positions)).astype(int)
        for mine, first, last in zip(found, [0, *edges], [*edges[:-1], len(positions)], strict=False):
            mine += positions[first:last].tolist()
    return found


@pytest.mark.parametrize("name", ["iid", "shards", "sharding", "dirichlet"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_deals_equal_lists_made_client_by_client(name, share):
    y = torch.arange(203) ** 2 % 7  # uneven classes: squares modulo 7 are 0, 1, 2 and 4
    result = deal(y, 3, name=name, clients=15, task_share=share, seed=4)
    count = round(15 * share)
    owners = sorted(rng.numpy_generator(rng.key(4, "owners", 3)).choice(15, count, replace=False).tolist())
    held = pieces_one_by_one(name, y.numpy(), count, rng.numpy_generator(rng.key(4, "partition", name, 3)))
    expected = dict(zip(owners, held, strict=True))
    for client in range(15):
        mine = sorted(expected.get(client, []))
        assert result.of(client).tolist() == result.rows[client].tolist() == mine
        assert result.sizes[client] == len(mine) == (client in result.owners and len(mine))
        assert (client in result.owners) == bool(mine)


def test_a_deal_to_very_many_clients_is_two_arrays():
    result = deal(torch.zeros(200_000).long(), 0, name="iid", clients=100_000, seed=0)
    assert result.order.shape == (200_000,) and result.sizes.tolist() == [2] * 100_000
    assert result.order.sort().values.equal(torch.arange(200_000))
    pairs = result.order.view(-1, 2)
    assert bool((pairs[:, 0] < pairs[:, 1]).all()) and result.of(99_999).equal(pairs[-1])


# --- as the stream says ----------------------------------------------------------------------------------------------


def held(*clients, n=12):
    x, y = torch.arange(2.0 * n).reshape(n, 2), torch.arange(n) % 2
    return from_tensors([(x + task, y, x[:4] + 50, y[:4]) for task in range(len(clients))], clients=clients)


def test_clients_hold_the_samples_that_the_stream_says():
    own = [torch.tensor([2, 0] * 6), torch.tensor([1] * 9 + [0] * 3)]
    options = ["partition.name=stream", "partition.clients=4", "rounds=1", "model.hidden=[4]"]
    population = Population(held(*own), cfl.resolve("custom", overrides=options))
    for task, clients in enumerate(own):
        for client in range(4):
            assert population.deals[task].of(client).tolist() == (clients == client).nonzero().flatten().tolist()
    assert [population.owners((task,)) for task in (0, 1)] == [(0, 2), (0, 1)]
    # Held-out samples leave the others where they are: of the 12 samples, 3 of each class are held out.
    kept, held_back = held_out(held(*own), 0.5, 0)
    dealt = Population(kept, cfl.resolve("custom", overrides=options)).deals[1]
    assert len(kept.tasks[1].train) == 6 and len(held_back[1]) == 6
    for client in range(4):
        ids = kept.tasks[1].train.index[dealt.of(client)] - held(*own).tasks[1].train.index[0]
        assert (own[1][ids] == client).all()


@pytest.mark.parametrize("kind", [np.array, torch.tensor, list, tuple, iter])
def test_clients_may_be_an_array_of_all_tasks(kind):
    own, (x, y) = [[0, 1, 1], [2, 0, 2]], (torch.arange(6.0).view(3, 2), [0, 1, 1])
    stream = from_tensors([(x, y, x + 9, y)] * 2, clients=kind(own))
    assert [task.clients.tolist() for task in stream.tasks] == own


def test_what_the_stream_says_must_fit():
    few = ["partition.name=stream", "partition.clients=3", "rounds=1"]  # 0, 1 and 2
    with pytest.raises(ConfigError, match=r"task 1 has samples of client 3; set partition.clients to 4 or more"):
        cfl.run(cfl.resolve("custom", overrides=few), stream=held([0] * 12, [3] * 12))
    with pytest.raises(ConfigError, match="needs a stream that says which client holds which sample; pass `clients`"):
        cfl.run(cfl.resolve("permuted-digits", overrides=few))
    with pytest.raises(ConfigError, match="leave partition.task_share at 1"):
        cfl.resolve("custom", overrides=[*few, "partition.task_share=0.5"])
    with pytest.raises(DataError, match="clients are given for 1 of 2 tasks; give an array for each task"):
        from_tensors([(torch.zeros(2, 2), [0, 1], torch.ones(2, 2), [0, 1])] * 2, clients=[[0, 0]])
    with pytest.raises(DataError, match=r"clients of task 0 must be 0, 1, 2, ..., not -1 \(sample 3\); number them so"):
        held([0, 0, 0, -1] * 3)
    task = held([0] * 12).tasks[0]
    with pytest.raises(DataError, match=r"clients of task '.*' are torch.int64 of shape \(3,\)"):
        dataclasses.replace(task, clients=torch.zeros(3, dtype=torch.int64))


def test_runs_on_other_owners_differ():
    before, after = (held(own).digests(public=False) for own in ([0, 1] * 6, [1, 0] * 6))
    (task,) = (plain := held([0] * 12)).tasks
    plain = dataclasses.replace(plain, tasks=(dataclasses.replace(task, clients=None),))
    assert len({*before.values(), *after.values(), *plain.digests(public=False).values()}) == 3
