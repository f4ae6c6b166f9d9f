"""Squared gradients of single samples: equal to a loop over the samples, for every use of a layer."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from cfl.core import rng
from cfl.models import Model, per_sample
from cfl.models.per_sample import squared_gradients
from tests import toy

LOSS = partial(F.cross_entropy, reduction="none")


class Twice(nn.Module):
    """A layer that is called twice, and one that does not reach the output."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.idle = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)

    def forward(self, x):
        self.idle(x)
        return self.head(torch.tanh(self.body(torch.tanh(self.body(x)))))


class Tokens(nn.Module):
    """Tokens as positions of a sample, then as rows of the batch: a sample has several rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        tokens = self.first(x.reshape(len(x), 3, 4)).tanh()
        moved = self.second(tokens.reshape(-1, 5)).tanh()
        return self.head(moved.reshape(len(x), 3, 5).mean(1))


class SequenceFirst(nn.Module):
    """Tokens along the first dimension, as many as samples."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.body(x.transpose(0, 1)).tanh().mean(0))


class Pieces(nn.Module):
    """A layer that sees four samples at a time."""

    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(torch.cat([self.body(part) for part in x.split(4)]).tanh())


class Last(nn.GRU):
    """A recurrent layer with a forward of its own, which takes no state."""

    def forward(self, x):
        return super().forward(x)[0][:, -1]


class OwnZeros(nn.Module):
    """Cells, the first of which starts with zeros that are not made from the inputs."""

    def __init__(self):
        super().__init__()
        self.gru, self.lstm, self.head = nn.GRUCell(3, 4), nn.LSTMCell(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        state = torch.zeros(len(x), 4, dtype=x.dtype)
        pair = state, state
        for step in x.unbind(1):
            state = self.gru(step, state)
            pair = self.lstm(state, pair)
        return self.head(pair[0])


class Filled(nn.Module):
    """Writes to a tensor that is not made from the inputs, which vmap refuses."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        out = torch.zeros(len(x), 3, dtype=x.dtype)
        out[:] = x @ self.weight
        return out


class Rectified(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


class Tied(nn.Module):
    """Two layers with the same weight."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.other.weight = self.one.weight

    def forward(self, x):
        return self.head(self.other(self.one(x).tanh()).tanh())


class Bare(nn.Module):
    """A weight without a Linear or Conv2d layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))

    def forward(self, x):
        return (x @ self.weight).tanh()


class Recurrent(nn.Module):
    """Recurrent layers and cells that start with zeros of their own."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(3, 2, num_layers=2, batch_first=True, bidirectional=True)
        self.rnn, self.lstm = nn.RNN(4, 5), nn.LSTM(5, 6, proj_size=4)
        self.cells = nn.ModuleList([nn.GRUCell(4, 4), nn.RNNCell(4, 4), nn.LSTMCell(4, 4)])
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        steps = self.rnn(self.gru(x)[0].transpose(0, 1))[0]
        last = self.lstm(steps)[0][-1]
        gru, rnn, lstm = self.cells
        return self.head(lstm(rnn(gru(last)))[0])


NETS = {
    "mlp": ((5,), lambda: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))),
    "conv": (
        (2, 6, 6),
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4, 6, 3, groups=2, padding="same", bias=False),
            nn.Flatten(),
            nn.Linear(54, 3),
        ),
    ),
    "norms": (
        (2, 4, 4),
        lambda: nn.Sequential(
            nn.Conv2d(2, 4, 2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LayerNorm(36), nn.Linear(36, 3)
        ),
    ),
    "twice": ((4,), Twice),
    "tokens": ((12,), Tokens),
    "sequence first": ((7, 4), SequenceFirst),  # 7 samples below
    "pieces": ((4,), Pieces),
    "tied": ((4,), Tied),
    "bare": ((4,), Bare),
    "recurrent": ((6, 3), Recurrent),
    "subclasses": (
        (2, 4, 4),
        lambda: nn.Sequential(toy.Standardised(2, 3, 3), nn.Tanh(), nn.Flatten(), Rectified(12, 6), nn.Linear(6, 3)),
    ),
    "own forward": ((6, 3), lambda: nn.Sequential(Last(3, 4, batch_first=True), nn.Linear(4, 3))),
    "own zeros": ((6, 3), OwnZeros),
}


def model_of(net):
    shape, make = NETS[net]
    with rng.fork(1):
        return Model(make().double(), shape, [3], multi_head=False), toy.random(7, *shape), torch.arange(7) % 3


def by_loop(model, x, y):
    """Sum of squared gradients by a backward pass for each sample."""
    sums = {name: torch.zeros_like(model.params[name]) for name in model.trainable(0)}
    for number in range(len(y)):
        leaves = {name: model.params[name].clone().requires_grad_() for name in sums}
        loss = F.cross_entropy(
            model.logits({**model.params, **leaves}, x[number : number + 1], 0), y[number : number + 1]
        )
        grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for name, grad in zip(sums, grads, strict=True):
            sums[name] += grad.square()
    return sums


@pytest.mark.parametrize("numbers", [2**24, 1])  # all samples at once, and one at a time
@pytest.mark.parametrize("net", NETS)
def test_sums_are_those_of_a_loop(net, numbers, monkeypatch):
    monkeypatch.setattr(per_sample, "_NUMBERS", numbers)
    model, x, y = model_of(net)
    with model.evaluation():
        ours = squared_gradients(model, model.params, model.trainable(0), LOSS, x, y, 0)
        expected = by_loop(model, x, y)
    assert list(ours) == list(expected)
    for name, leaf in expected.items():
        torch.testing.assert_close(ours[name], leaf, atol=1e-14, rtol=1e-12)
    assert sum(float(leaf.sum()) for leaf in expected.values()) > 0.1


@pytest.mark.parametrize(
    ("net", "others"),
    [("mlp", []), ("conv", []), ("norms", ["1.weight", "1.bias", "4.weight", "4.bias"]),
     ("tokens", ["second.weight", "second.bias"])],
)  # fmt: skip
def test_only_parameters_outside_plain_layers_need_vmap(net, others, monkeypatch):
    def vmap(*_):
        raise NotImplementedError

    monkeypatch.setattr(torch.func, "vmap", vmap)
    model, x, y = model_of(net)
    direct = [name for name in model.trainable(0) if name not in others]
    with model.evaluation():
        assert list(squared_gradients(model, model.params, direct, LOSS, x, y, 0)) == direct
        for name in others:
            with pytest.raises(NotImplementedError):
                squared_gradients(model, model.params, [name], LOSS, x, y, 0)


def test_a_model_without_layers_before_the_heads_has_no_shared_weights():
    with rng.fork(1):
        model = Model(nn.Linear(4, 3).double(), (4,), [3, 3], multi_head=True)
    assert squared_gradients(model, model.params, [], LOSS, toy.random(5, 4), torch.arange(5) % 3, 1) == {}


def test_only_the_named_leaves_are_returned_and_nothing_is_written():
    model, x, y = model_of("conv")
    before = {name: leaf.clone() for name, leaf in model.params.items()}
    assert list(squared_gradients(model, model.params, ["0.bias", "4.weight"], LOSS, x, y, 0)) == ["0.bias", "4.weight"]
    assert all(torch.equal(model.params[name], leaf) for name, leaf in before.items())
    assert not model.module[0]._forward_hooks  # the hooks are removed


def test_a_forward_that_vmap_does_not_run_is_told_what_to_write():
    model = Model(Filled(), (4,), [3], multi_head=False)
    with pytest.raises(RuntimeError, match=r"make tensors of the inputs, as by x\.new_zeros\(\.\.\.\)"):
        squared_gradients(model, model.params, ["weight"], LOSS, toy.random(5, 4).float(), torch.arange(5) % 3, 0)
