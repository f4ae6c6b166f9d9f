"""`benchmarks/lora_orthogonality.py`: the share of a step within earlier inputs, and the change of earlier logits."""

import pytest
import torch
from torch import nn

from cfl.models import Model
from cfl.models.adapters import Lora, adapted
from tests import toy


def handle():
    """y = V (W + B A) x with V, W the 2 x 2 identity, of which A = (1 0) and B = (1 0)^T are an adapter of rank 1."""
    net = toy.net(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    for layer in net:
        layer.weight.data = torch.eye(2, dtype=torch.float64)
    model = Model(adapted(net, (2,), Lora(rank=1), seed=0), (2,), [2], multi_head=False)
    one, row = torch.tensor([[1.0], [0.0]]).double(), torch.tensor([[1.0, 0.0]]).double()
    return model, {**model.params, "0.a.weight": row, "0.b.weight": one}


def test_overlap_and_change_by_hand(script):
    # Earlier inputs are multiples of (1, 0), and A x is all of the line of B's inputs. A moves by (3, 4): of its energy
    # 25, 9 lies within. B moves by (0, 0) or by (5, 0), whose energy 25 is all within.
    module, (model, before) = script("lora_orthogonality"), handle()
    old = [torch.tensor([[1.0, 0.0], [2.0, 0.0]]).double()]
    after = {**before, "0.a.weight": before["0.a.weight"] + torch.tensor([[3.0, 4.0]])}
    assert module.overlap(model, before, after, old) == pytest.approx(9 / 25)
    both = {**after, "0.b.weight": before["0.b.weight"] + torch.tensor([[5.0], [0.0]])}
    assert module.overlap(model, before, both, old) == pytest.approx((9 + 25) / 50)
    assert module.overlap(model, before, before, old) == 0
    # f(x) = (x_1 + A x, x_2): (2, 0) for x = (1, 0) becomes (5, 0), a change of 3 / 2
    assert module.change(model, before, after, old) == pytest.approx(1.5)
