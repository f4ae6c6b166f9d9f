"""Partial sums: merged in any grouping, they equal the sum of all uploads."""

import pytest
import torch

from cfl.aggregation.plain import UploadSum
from cfl.core import RoundAborted, UpdateError
from tests.engines.test_loop import info_of
from tests.engines.test_vmapped import model_of

GATHERS = {"strategy": "mean", "mean": "mean", "sum": "sum", "stack": "stack"}
INFO = info_of(model_of(), range(5))


def upload(client):
    """Small whole numbers, so that sums are exact in any order; each client has its own counter."""
    leaf = torch.tensor([float(client), 2.0])
    return {"strategy": {"w": leaf, "n": torch.tensor(10 + client)}, "sum": {"a": leaf}, "stack": {"b": leaf}}


def leaves_of(value):
    """All tensors in nested dictionaries."""
    if isinstance(value, dict):
        return [leaf for inner in value.values() for leaf in leaves_of(inner)]
    return [value] if isinstance(value, torch.Tensor) else []


def total(groups, part=True):
    whole = UploadSum(INFO, GATHERS)
    for group in groups:
        own = UploadSum(INFO, GATHERS) if part else whole
        for client in group:
            own.add(client, upload(client), client + 1.0)
        if part:
            whole.merge(own.part())
    return whole


@pytest.mark.parametrize("groups", [[[0, 1, 2]], [[1], [0, 2]], [[2, 1], [], [0]], [[2], [1], [0]]])
def test_parts_put_together_are_the_sum_of_all(groups):
    expected, found = total([[0, 1, 2]], part=False), total(groups)
    one, other = expected.close(), found.close()
    for owner, leaves in one.items():
        assert all(torch.equal(leaf, other[owner][name]) for name, leaf in leaves.items()), owner
    # weights 1, 2, 3: (0 + 2 + 6) / 6; counters are those of the lowest id; stacks by id
    assert other["strategy"]["w"].tolist() == pytest.approx([8 / 6, 2.0])
    assert other["strategy"]["n"].item() == 10
    assert other["sum"]["a"].tolist() == [3.0, 6.0] and other["stack"]["b"][:, 0].tolist() == [0, 1, 2]
    assert found.traffic() == expected.traffic() == (3 * (3 * 8 + 8), 0)


def test_what_is_merged_is_not_kept():
    own, whole = UploadSum(INFO, GATHERS), UploadSum(INFO, GATHERS)
    own.add(3, upload(3), 1.0)
    part = own.part()
    whole.merge(part)
    for leaf in leaves_of(part):
        leaf.data = leaf.data.clone().fill_(-7)
    found = whole.close()
    assert found["strategy"]["w"].tolist() == [3.0, 2.0] and found["stack"]["b"].tolist() == [[3.0, 2.0]]
    assert found["strategy"]["n"].item() == 13


def test_an_upload_of_another_shape_is_named_when_parts_meet():
    whole, own = total([[0, 1]]), UploadSum(INFO, GATHERS)
    own.add(2, {**upload(2), "sum": {"a": torch.ones(3)}}, 1.0)
    with pytest.raises(UpdateError, match=r"client 2 sent 'sum/a' with shape \(3,\), and others with shape \(2,\)"):
        whole.merge(own.part())


def test_parts_without_clients_are_no_sum():
    with pytest.raises(RoundAborted, match="no client of the cohort has answered"):
        total([[], []]).close()


@pytest.mark.parametrize("groups", [[[0, 1]], [[1], [0]], [[], [1]]])
def test_clients_that_send_nothing_have_answered(groups):
    whole = UploadSum(INFO, GATHERS)
    for group in groups:
        own = UploadSum(INFO, GATHERS)
        assert all(own.add(client, {}, 1.0) for client in group)
        whole.merge(own.part())
    assert whole.close() == {}
    with pytest.raises(UpdateError, match=r"client 3 sent 'strategy/w' with shape \(2,\), and others not at all"):
        whole.add(3, upload(3), 1.0)
