"""McMahan's CNN: number of parameters, outputs by hand, layers and heads."""

import pytest
import torch
import torch.nn.functional as F

from cfl import models
from cfl.core import ConfigError, rng
from cfl.models import Model

SMALL = {"width": 3, "hidden": 7}


def make(shape, outputs=5, **options):
    """A network in float64, and two images."""
    with rng.fork(1):
        module = models.build("cnn", shape, outputs, options).double()
    return module, torch.randn(2, *shape, dtype=torch.float64, generator=rng.generator(2))


def count(module):
    return sum(leaf.numel() for leaf in module.parameters())


@pytest.mark.parametrize(
    ("shape", "pixels"), [((1, 28, 28), 7 * 7), ((3, 32, 32), 8 * 8), ((3, 28, 28), 7 * 7), ((3, 30, 33), 7 * 8)]
)
def test_parameters(shape, pixels):
    # two convolutions, the hidden layer, the classifier; each has a bias
    expected = (25 * shape[0] + 1) * 32 + (25 * 32 + 1) * 64 + (64 * pixels + 1) * 512 + 513 * 10
    assert count(models.build("cnn", shape, 10, {})) == expected


def test_parameters_of_the_paper():
    assert count(models.build("cnn", (1, 28, 28), 10, {})) == 1_663_370  # McMahan et al., 2017, Section 3
    assert count(models.build("cnn", (1, 28, 28), 10, {"repeat_grey": True})) == 1_663_370 + 2 * 25 * 32


@pytest.mark.parametrize(
    ("shape", "repeat_grey"),
    [((1, 28, 28), False), ((1, 8, 8), True), ((3, 9, 14), False), ((3, 4, 4), False)],
    ids=str,
)
def test_outputs_by_hand(shape, repeat_grey):
    module, x = make(shape, **SMALL, repeat_grey=repeat_grey)
    first, first_bias, second, second_bias, hidden, hidden_bias, last, last_bias = module.parameters()
    assert first.shape[1] == (3 if repeat_grey else shape[0])
    out = torch.cat([x, x, x], dim=1) if repeat_grey else x
    for weight, bias in ((first, first_bias), (second, second_bias)):
        out = F.max_pool2d(F.conv2d(out, weight, bias, padding=2).relu(), 2)  # an odd side loses a pixel
    features = (out.reshape(2, -1) @ hidden.T + hidden_bias).relu()
    assert torch.allclose(module(x), features @ last.T + last_bias, atol=1e-12)
    model = Model(module, shape, [5], multi_head=False)
    assert torch.allclose(model.features(model.params, x, 0), features, atol=1e-12)


def test_layers_and_heads():
    module, x = make((3, 8, 8), **SMALL)
    model = Model(module, (3, 8, 8), [5, 2], multi_head=True)
    assert [layer.size for layer in model.layers] == [25 * 3, 25 * 3, 6 * 2 * 2]  # 3 channels, 3 filters, 6 x 2 x 2
    assert model.head(1) == ("9.weight@1", "9.bias@1")
    assert model.logits(model.params, x, 1).shape == (2, 2)
    assert model.outputs(model.params, x, 0, (0, 1)).shape == (2, 2, 5)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((64,), {}, r"needs images \(channels, height, width\)"),
        ((1, 3, 8), {}, "at least 4 x 4 pixels, not 3 x 8"),
        ((32, 32, 3), {}, "not 32 x 3; channels come first"),
        (
            (3, 8, 8),
            {"repeat_grey": True},
            r"model\.repeat_grey=true is for grey images, not 3 channels; set it to false",
        ),
        ((1, 8, 8), {"width": 0}, r"model\.width must be a whole number of at least 1, not 0"),
        ((1, 8, 8), {"hidden": 1.5}, r"model\.hidden must be a whole number, not 1\.5"),
        ((1, 8, 8), {"hidden": True}, r"model\.hidden must be a whole number, not True"),
        ((1, 8, 8), {"hiden": 4}, r"unknown option 'model\.hiden'; did you mean 'model\.hidden'\?"),
    ],
)
def test_errors(shape, options, message):
    with pytest.raises(ConfigError, match=message):
        models.build("cnn", shape, 2, options)
