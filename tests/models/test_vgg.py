"""VGG-11: number of parameters, torchvision's features as the reference, and small images."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.vgg import cfgs, make_layers

from cfl import models
from cfl.core import ConfigError, rng
from cfl.models import Model

FILTERS = (64, 128, 256, 256, 512, 512, 512, 512)  # configuration A


def make(shape, outputs=5, **options):
    """A network in float64, and two images."""
    with rng.fork(1):
        module = models.build("vgg11", shape, outputs, options).double()
    return module, torch.randn(2, *shape, dtype=torch.float64, generator=rng.generator(2))


def convolutions(channels):
    return sum((9 * a + 1) * b for a, b in zip((channels, *FILTERS), FILTERS, strict=False))


@pytest.mark.parametrize(
    ("shape", "options", "further"),
    [
        ((3, 32, 32), {}, 513 * 10),
        ((1, 28, 28), {}, 513 * 10),
        ((3, 32, 32), {"norm": True}, 2 * sum(FILTERS) + 513 * 10),  # weight and bias of each filter
        ((3, 32, 32), {"hidden": [512, 512]}, 2 * 513 * 512 + 513 * 10),  # as in FedSOL's code
        ((3, 32, 65), {}, (3 * 512 + 1) * 10),  # 1 x 3 pixels left
    ],
)
def test_parameters(shape, options, further):
    module = models.build("vgg11", shape, 10, options)
    assert sum(leaf.numel() for leaf in module.parameters()) == convolutions(shape[0]) + further


def test_parameters_for_cifar_10():
    assert convolutions(3) + 513 * 10 == 9_225_610


@pytest.mark.parametrize("norm", [False, True])
def test_outputs_are_those_of_torchvisions_features(norm):
    module, x = make((3, 32, 32), norm=norm)
    with rng.fork(2):
        theirs = nn.Sequential(*make_layers(cfgs["A"], norm), nn.Flatten(), nn.Linear(512, 5)).double()
    for ours, other in zip(module.state_dict().values(), theirs.state_dict().values(), strict=True):
        other.copy_(ours)
    assert torch.allclose(module.eval()(x), theirs.eval()(x), atol=1e-10)


def test_convolutions_are_initialised_as_he_et_al():
    module, _ = make((3, 32, 32))
    for layer in module:
        if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 10_000:
            # five standard errors of a standard deviation: 5 / sqrt(2 n), below 3.5 % for n above 10,000
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * len(layer.weight))), rel=0.035)
            assert layer.bias.count_nonzero() == 0


@pytest.mark.parametrize("side", [1, 8, 17, 28, 32])
def test_images_up_to_32_pixels_end_as_one_pixel(side):
    module, x = make((1, side, side), width=2)
    model = Model(module, (1, side, side), [5], multi_head=False)
    assert model.features(model.params, x, 0).shape == (2, 16)
    assert module(x).shape == (2, 5)


def test_layers_and_heads():
    module, x = make((3, 32, 32), width=2, hidden=[6])
    model = Model(module, (3, 32, 32), [5, 3], multi_head=True)
    # nine inputs for each filter (of a narrow network: 1 / 32 of the usual) of the layer before, then one pixel
    assert [layer.size for layer in model.layers] == [27, *(9 * f // 32 for f in FILTERS[:-1]), 16]
    assert model.head(1) == ("24.weight@1", "24.bias@1")  # after 8 x 2 + 5 modules, flattening, and a hidden layer
    assert model.logits(model.params, x, 1).shape == (2, 3)
    assert model.outputs(model.params, x, 0, (0, 1)).shape == (2, 2, 5)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((64,), {}, r"needs images \(channels, height, width\)"),
        ((1, 0, 8), {}, "at least 1 x 1 pixels, not 0 x 8"),
        ((1, 8, 8), {"width": -1}, r"model\.width must be a whole number of at least 1, not -1"),
        ((1, 8, 8), {"hidden": 512}, r"model\.hidden must be a list \(each a whole number\), not 512"),
        ((1, 8, 8), {"hidden": [8, 0]}, r"model\.hidden\[1\] must be a whole number of at least 1, not 0"),
    ],
)
def test_errors(shape, options, message):
    with pytest.raises(ConfigError, match=message):
        models.build("vgg11", shape, 2, options)
