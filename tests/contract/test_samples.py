"""Batches, and leaves of several batches put together."""

import torch

from cfl.contract import Batch
from cfl.contract.samples import equally_long, joined


def test_a_whole_batch_has_no_padding_and_a_mask_of_its_inputs_dtype():
    y, ids = torch.tensor([1, 0]), torch.tensor([4, 7])
    for x, dtype in ((torch.zeros(2, 3).double(), torch.float64), (torch.zeros(2, 2, 8).long(), torch.float32)):
        batch = Batch.whole(x, y, ids)
        assert batch.mask.tolist() == [1.0, 1.0] and batch.mask.dtype == dtype
        assert batch.x is x and batch.y is y and batch.ids is ids and batch.task is None
    assert Batch.whole(x, y, ids, y).task is y


def test_tokens_of_unequal_length_are_padded_with_zeros_behind():
    short, long = torch.ones(1, 2, 8, dtype=torch.int64), torch.ones(2, 2, 16, dtype=torch.int64)
    found = joined([short, long])
    assert found.shape == (3, 2, 16) and found.dtype == torch.int64
    assert found[0, :, :8].eq(1).all() and not found[0, :, 8:].any() and torch.equal(found[1:], long)
    assert [leaf.shape[2] for leaf in equally_long([long, short])] == [16, 16]


def test_other_leaves_are_joined_as_they_are():
    for leaves in ([torch.tensor([1, 2]), torch.tensor([3])], [torch.ones(1, 3, 4), torch.zeros(2, 3, 4)]):
        assert torch.equal(joined(leaves), torch.cat(leaves))
        assert joined(leaves[:1]) is leaves[0]  # no copy
