"""Layers that can be projected: their inputs, groups of a convolution, and shared weights."""

import pytest
import torch
from torch import nn

from cfl.core import rng
from cfl.models import Model
from tests import toy

CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 6, 3),
    "stride": lambda: nn.Conv2d(4, 6, 2, stride=2, padding=1, bias=False),
    "shortcut": lambda: nn.Conv2d(4, 6, 1, stride=2),
    "even-same": lambda: nn.Conv2d(4, 6, (4, 3), padding="same"),
    "dilated": lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=(2, 1)),
    "reflect": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "circular": lambda: nn.Conv2d(4, 6, 3, padding=(1, 2), padding_mode="circular"),
    "grouped": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "depthwise": lambda: nn.Conv2d(4, 8, 3, padding=1, groups=4, bias=False),
    "sequence": lambda: nn.Conv1d(4, 6, 3),
    "sequence-stride": lambda: nn.Conv1d(4, 6, 2, stride=2, padding=1, dilation=2, groups=2, bias=False),
    "sequence-same": lambda: nn.Conv1d(4, 6, 4, padding="same"),
    "sequence-reflect": lambda: nn.Conv1d(4, 6, 3, padding=2, padding_mode="reflect"),
}


@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel")
@pytest.mark.parametrize("case", CONVOLUTIONS)
def test_layer_inputs_times_weight_is_the_convolution(case):
    with rng.fork(1):
        conv = CONVOLUTIONS[case]().double()
    shape = (4, 7, 6) if isinstance(conv, nn.Conv2d) else (4, 7)
    width = conv(torch.zeros(1, *shape).double()).numel()
    model = Model(nn.Sequential(conv, nn.Flatten()), shape, [width], multi_head=False)
    x = torch.randn(3, *shape, dtype=torch.float64, generator=rng.generator(3))
    expected = conv(x)
    assert len(model.layers) == conv.groups
    for layer in model.layers:
        weight = model.params[layer.weight][layer.rows].flatten(1)
        outputs = layer.inputs(x) @ weight.T  # (batch, positions, outputs of the group)
        if layer.bias:
            outputs = outputs + model.params[layer.bias][layer.rows]
        outputs = outputs.transpose(1, 2).reshape(3, -1, *expected.shape[2:])
        assert layer.size == weight.shape[1]
        assert torch.allclose(outputs, expected[:, layer.rows], atol=1e-12)


def test_groups_split_the_rows_of_the_weight():
    conv = nn.Conv2d(4, 6, 1, groups=2)
    model = Model(nn.Sequential(conv, nn.Flatten(), nn.Linear(24, 2)), (4, 2, 2), [2, 2], multi_head=True)
    assert [(layer.name, layer.rows) for layer in model.layers] == [
        ("0.group0", slice(0, 3)),
        ("0.group1", slice(3, 6)),
    ]


@pytest.mark.parametrize("groups", [1, 2])
def test_put_replaces_the_rows_of_a_group(groups):
    """The part is a view with gaps, as a basis of weight and bias leaves it; the result has none."""
    model = Model(nn.Sequential(nn.Conv2d(4, 6, 1, groups=groups), nn.Flatten()), (4, 1, 1), [6], multi_head=False)
    layer, leaf = model.layers[-1], model.params[model.layers[-1].weight]
    part = torch.arange(60.0).view(6 // groups, -1)[:, : 4 // groups]
    found = layer.put(leaf, part)
    assert found.is_contiguous() and found.shape == leaf.shape
    assert torch.equal(found[layer.rows].flatten(1), part)
    assert groups == 1 or torch.equal(found[:3], leaf[:3])


def test_inputs_of_a_linear_layer_on_sequences():
    class Mean(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(5, 4), nn.Linear(4, 2)

        def forward(self, x):
            return self.head(self.inner(x).mean(1))

    model = Model(Mean(), (3, 5), [2, 2], multi_head=True)
    x = torch.randn(2, 3, 5, generator=rng.generator(4))
    assert torch.equal(model.layers[0].inputs(x), x)  # positions are the steps of the sequence
    assert model.layers[0].inputs(x[:, 0]).shape == (2, 1, 5)


@pytest.mark.parametrize("length", [2, 3, 5])  # a trial run has 2 samples, another one 3
@pytest.mark.parametrize("way", ["batch", "sequence", "both"])
def test_a_layer_that_has_other_rows_than_samples_is_mixed(way, length):
    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

        def forward(self, x):
            if way == "both":
                return self.head(self.body(x.flatten(0, 1)).unflatten(0, (-1, length)).mean(1))
            return self.head(self.body(x if way == "batch" else x.transpose(0, 1)).mean(1 if way == "batch" else 0))

    model = Model(Tokens(), (length, 4), [3], multi_head=False)
    assert {layer.name: layer.mixed for layer in model.layers} == {"body": way != "batch", "head": False}


def test_inputs_that_are_no_tensors_and_trials_that_fail_count_as_mixed():
    class Listed(nn.Linear):
        def forward(self, parts):
            return super().forward(torch.cat(parts, dim=1))

    class Even(nn.Module):
        """Positions first, two of them, for batches of an even number of samples."""

        def __init__(self):
            super().__init__()
            self.first, self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 5), Listed(10, 3)

        def forward(self, x):
            x = self.first(x).unflatten(0, (-1, 2)).flatten(0, 1)
            one, two = self.body(x.transpose(0, 1))
            return self.head([one, two])

    model = Model(Even(), (2, 4), [3], multi_head=False)
    assert {layer.name: layer.mixed for layer in model.layers} == {"first": False, "body": True, "head": True}


def test_layers_that_share_a_weight_are_not_projected():
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    model = Model(nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Linear(4, 3)), (4,), [3], multi_head=False)
    assert [layer.name for layer in model.layers] == ["4"]
    assert model.logits(model.params, torch.zeros(2, 4), 0).shape == (2, 3)


def test_a_layer_under_two_names_is_one_layer():
    model = Model(toy.TwoNames(), (4,), [2, 3], multi_head=True)
    assert [layer.weight for layer in model.layers] == ["first.weight"]
    assert model.head(1) == ("last.weight@1", "last.bias@1")
    assert model.logits(model.params, torch.zeros(2, 4), 1).shape == (2, 3)


def test_a_layer_whose_weight_is_computed_cannot_be_projected():
    first = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
    net = nn.Sequential(first, nn.ReLU(), nn.Linear(6, 5), nn.Linear(5, 2))
    model = Model(net, (4,), [2], multi_head=False)
    assert [layer.weight for layer in model.layers] == ["2.weight", "3.weight"]
    assert {"0.parametrizations.weight.original0", "0.parametrizations.weight.original1"} <= set(model.trainable(0))
