"""Dealing a task's samples to clients."""

import pytest
import torch

from cfl.errors import ConfigError, DataError
from cfl.streams import deal, from_tensors

CIFAR_TASK = torch.arange(10).repeat(500)  # the labels of one task of split-cifar100: 10 classes x 500, mixed


def _dealt(result):
    return torch.cat(result.rows)


def test_iid_deals_equal_disjoint_parts():
    targets = torch.zeros(103, dtype=torch.int64)
    result = deal(targets, 0, name="iid", clients=10, seed=0)
    assert [len(rows) for rows in result.rows] == [10] * 10  # floor(103 / 10); three samples are dropped
    assert len(_dealt(result).unique()) == 100 and _dealt(result).max() < 103
    assert result.owners == tuple(range(10)) and result.without_data == ()


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


def test_dirichlet_ends_with_more_clients_than_it_serves():
    result = deal(CIFAR_TASK, 0, name="dirichlet", clients=500, alpha=1e-3, seed=1)
    assert len(_dealt(result)) == 5000
    assert result.without_data and sorted((*result.owners, *result.without_data)) == list(range(500))
    assert all(len(result.rows[client]) == 0 for client in result.without_data)


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


@pytest.mark.parametrize("name", ["iid", "shards", "dirichlet"])
def test_draws_depend_on_seed_and_task_only(name):
    def rows(task, seed):
        torch.manual_seed(task + seed)
        return [part.tolist() for part in deal(CIFAR_TASK, task, name=name, clients=20, seed=seed).rows]

    first = rows(2, 7)
    assert rows(3, 7) != first and rows(2, 8) != first
    assert rows(2, 7) == first


def test_the_test_part_is_not_dealt():
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
