"""Channels last: the same outputs and the same training, and modules that do not allow it."""

import pytest
import torch
from torch import nn

from cfl import models
from cfl.core import optim, rng
from cfl.models import Model
from cfl.models.memory_format import Layout, allows_channels_last, is_channels_last

SHAPE = (3, 8, 8)


class Viewing(nn.Module):
    """A network whose forward reads its activations as one row in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4 * 6 * 6, 5)

    def forward(self, x):
        return self.head(self.conv(x).view(len(x), -1))


class ViewingInTraining(Viewing):
    """The same in training mode alone, and after a max pooling, with which steps gain by channels last."""

    def forward(self, x):
        x = self.conv(x)
        return self.head(x.view(len(x), -1) if self.training else x.flatten(1))


class ByStride(nn.Module):
    """A network whose outputs depend on the memory layout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 8)

    def forward(self, x):
        return self.conv(x).flatten(1) * x.stride(1)


def network() -> nn.Module:
    with rng.fork(0):
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 5))


def test_who_allows_it():
    assert allows_channels_last(network(), SHAPE, "cpu")
    assert allows_channels_last(models.build("resnet18", (3, 16, 16), 5, {}), (3, 16, 16), "cpu")
    assert not allows_channels_last(Viewing(), SHAPE, "cpu")
    assert not allows_channels_last(ViewingInTraining(), SHAPE, "cpu")
    assert not allows_channels_last(ByStride(), SHAPE, "cpu")
    assert not allows_channels_last(network().double(), SHAPE, "cpu")  # its convolutions have no such kernels
    assert not allows_channels_last(nn.Linear(4, 2), (4,), "cpu")
    assert not allows_channels_last(network(), SHAPE, "cuda")


def test_who_gains():
    assert Layout(network(), SHAPE, "cpu", "float32").gains
    resnet, shape = models.build("resnet18", (3, 16, 16), 5, {}), (3, 16, 16)
    assert Layout(resnet, shape, "cpu", "bf16").gains and not Layout(resnet, shape, "cpu", "float32").gains
    model = Model(resnet, shape, [5], multi_head=False)
    assert not any(map(is_channels_last, model.layout.laid_out(model.params).values()))


def test_copies():
    """Compiled steps gain wherever the module allows channels last."""
    shape = (3, 16, 16)
    model = Model(models.build("resnet18", shape, 5, {}), shape, [5], multi_head=False)
    weight, head = model.params["stem.weight"], model.params["head.weight"]
    for leaf in (weight, head):
        copies = [model.layout.copy_of(leaf), model.layout.copy_of(leaf, compiled=True)]
        assert [is_channels_last(each) for each in copies] == [False, leaf is weight]
        assert all(torch.equal(each, leaf) and each.data_ptr() != leaf.data_ptr() for each in copies)
    assert not is_channels_last(model.layout.copy_of(weight[:1], compiled=True))  # one output channel
    other = Model(Viewing(), SHAPE, [5], multi_head=False)
    assert not is_channels_last(other.layout.copy_of(other.params["conv.weight"], compiled=True))


def test_outputs_are_the_same():
    model = Model(network(), SHAPE, [5], multi_head=False)
    x = torch.randn(6, *SHAPE, generator=rng.generator(1))
    laid = model.layout.laid_out(model.params)
    assert [name for name, leaf in laid.items() if is_channels_last(leaf)] == ["0.weight"]
    assert torch.allclose(model.logits(laid, x, 0), model.logits(model.params, x, 0), atol=1e-6)
    other = Model(Viewing(), SHAPE, [5], multi_head=False)
    assert not any(map(is_channels_last, other.layout.laid_out(other.params).values()))


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_fused_update_pairs_the_same_numbers(decay):
    draws = rng.generator(2)
    params, grads = (
        {"w": torch.randn(4, 3, 5, 5, generator=draws), "b": torch.randn(4, generator=draws)} for _ in "ab"
    )
    expected = {name: leaf - 0.5 * (grads[name] + decay * leaf) for name, leaf in params.items()}
    lay = lambda leaves: {**leaves, "w": leaves["w"].contiguous(memory_format=torch.channels_last)}  # noqa: E731
    sgd = optim.sgd(0.0, decay)
    cases = [(params, grads), (lay(params), lay(grads)), (lay(params), grads), (params, lay(grads))]
    stacked = lambda leaves: {name: leaf[None] for name, leaf in leaves.items()}  # noqa: E731  # a block of one client
    for given, slope in [*cases, *((stacked(one), stacked(other)) for one, other in cases)]:
        found = {name: leaf.clone() for name, leaf in given.items()}
        assert sgd.fuses(slope, found)
        sgd.update(slope, {}, found, 0.5, 0)
        assert all(torch.allclose(leaf, expected[name], atol=1e-6) for name, leaf in found.items())
