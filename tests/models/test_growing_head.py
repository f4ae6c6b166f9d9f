"""A head with a part for the classes of each task, which are joined as tasks arrive."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.core import ConfigError, rng
from cfl.models import Model
from cfl.models.mlp import mlp

SIZES = (2, 3, 1)


def made(**options):
    with rng.fork(1):
        module = mlp((4,), 2, hidden=(5,))
    return Model(module, (4,), SIZES, multi_head=True, growing=True, **options)


def body(model, x):
    """Inputs of the head, written by hand."""
    names = [name for name in model.params if "@" not in name]
    weight, bias = (model.params[name] for name in names)
    return F.relu(F.linear(x, weight, bias))


@pytest.mark.parametrize("task", range(3))
def test_outputs_are_those_of_all_parts_so_far(task):
    model, x = made(), torch.randn(7, 4)
    h = body(model, x)
    parts = [F.linear(h, *(model.params[name] for name in model.new_head(part))) for part in range(task + 1)]
    found = model.logits(model.params, x, task)
    assert found.shape == (7, sum(SIZES[: task + 1])) and torch.allclose(found, torch.cat(parts, dim=1))


def test_a_new_part_leaves_old_outputs_alone_to_the_bit():
    """Whole numbers, whose sums are exact: products of other sizes may add in another order."""
    model, x = made(), torch.randn(7, 4).mul(4).round()
    model.start_from({name: leaf.mul(9).round() for name, leaf in model.params.items()})
    for task in (1, 2):
        old = model.logits(model.params, x, task - 1)
        assert model.logits(model.params, x, task)[:, : old.shape[1]].equal(old)


def test_each_sample_of_a_memory_has_the_outputs_of_all_parts():
    model, x = made(), torch.randn(3, 4)
    own = model.own_logits(model.params, x, 1, torch.tensor([0, 1, 1]))
    assert own.equal(model.logits(model.params, x, 1))


def test_names_of_the_parts():
    model = made()
    first, second = model.new_head(0), model.new_head(1)
    assert model.head(0) == first and model.head(1) == first + second
    assert model.old_head(1) == set(first) and model.old_head(0) == frozenset()
    assert set(model.trainable(1)) == {name for name in model.params if not name.endswith("@2")}
    assert [model.classes_of(task) for task in range(3)] == [slice(0, 2), slice(2, 5), slice(5, 6)]


def test_the_parts_are_the_heads_of_scenario_task():
    with rng.fork(1):
        module = mlp((4,), 2, hidden=(5,))
    plain = Model(module, (4,), SIZES, multi_head=True)
    assert plain.params.keys() == made().params.keys()
    assert all(leaf.equal(made().params[name]) for name, leaf in plain.params.items())
    assert plain.old_head(2) == frozenset() and plain.head(2) == plain.new_head(2)


def test_running_statistics_of_each_task_are_refused():
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    with pytest.raises(ConfigError, match="nothing tells the task of a test sample, nor its running statistics: set"):
        Model(net, (4,), SIZES, multi_head=True, growing=True)
    assert Model(net, (4,), SIZES, multi_head=True, growing=True, norm_stats="running").buffers(0)
