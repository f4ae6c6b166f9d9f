"""Dropout with its own masks, against `nn.Dropout`."""

import torch
from torch import nn

from cfl.models.dropout import Dropout

N, RATE = 200_000, 0.3


def test_masks_have_the_distribution_of_nn_dropout():
    torch.manual_seed(0)
    x = torch.rand(N) + 1
    out = Dropout(RATE)(x)
    kept = out != 0
    # standard error of the share in N draws: sqrt(.3 * .7 / N) = .001; the bound is five times that
    assert abs(kept.float().mean() - (1 - RATE)) < 0.005
    assert torch.allclose(out[kept], x[kept] / (1 - RATE))
    pairs = (kept[:-1] & kept[1:]).float().mean()  # neighbours are independent
    assert abs(pairs - (1 - RATE) ** 2) < 0.006


def test_the_gradient_has_the_mask_of_the_pass():
    x = torch.rand(1000, requires_grad=True)
    out = Dropout(RATE)(x)
    (grad,) = torch.autograd.grad(out.sum(), x)
    assert torch.allclose(grad, (out != 0) / (1 - RATE))


def test_rates_of_zero_and_one_and_evaluation_mode():
    x = torch.rand(50) + 1
    assert torch.equal(Dropout(0.0)(x), x)
    assert torch.equal(Dropout(RATE).eval()(x), x)
    assert torch.equal(Dropout(1.0)(x), torch.zeros(50))
    assert isinstance(Dropout(RATE), nn.Dropout)  # evaluation and `ctx.forward(dropout=False)` look for this class


def test_clients_of_a_block_have_different_masks():
    x = torch.ones(4, 500)
    out = torch.func.vmap(Dropout(RATE), randomness="different")(x)
    assert len({tuple(row.tolist()) for row in out}) == 4


def test_half_floats_have_the_same_rates():
    torch.manual_seed(0)
    kept = Dropout(0.001)(torch.ones(N, dtype=torch.bfloat16)) != 0
    assert abs(kept.float().mean() - 0.999) < 0.0004  # five times sqrt(.001 * .999 / N) = .00007
