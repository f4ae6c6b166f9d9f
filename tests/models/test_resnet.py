"""The ResNets: sizes, torchvision's blocks as the reference, and initial values."""

import math

import pytest
import torch
from torch import nn
from torchvision.models.resnet import BasicBlock, ResNet

from cfl import models
from cfl.core import ConfigError, rng
from cfl.models import Model

NAMES = ("resnet18", "resnet18_cifar", "resnet8")


def make(name, shape, outputs=5, **options):
    """A network in float64, and two images."""
    with rng.fork(1):
        module = models.build(name, shape, outputs, options).double()
    return module, torch.randn(2, *shape, dtype=torch.float64, generator=rng.generator(2))


def body(depth, width=64, channels=3, norm=True):
    """Parameters without the head: a convolution of k x k from a to b has k k a b, its normalisation 2 b."""
    total = 9 * channels * width + 2 * norm * width
    for stage in range(4):
        a, b = width * 2 ** max(stage - 1, 0), width * 2**stage
        total += 9 * a * b + (2 * depth - 1) * 9 * b * b + 2 * depth * 2 * norm * b
        total += (a * b + 2 * norm * b) if stage else 0  # the 1 x 1 shortcut
    return total


@pytest.mark.parametrize(
    ("name", "shape", "options", "derived", "known"),
    [
        ("resnet18_cifar", (3, 32, 32), {}, body(2) + 513 * 10, 11_173_962),
        ("resnet18_cifar", (1, 28, 28), {"width": 4, "norm": False}, body(2, 4, 1, False) + 33 * 10, None),
        ("resnet8", (3, 32, 32), {}, body(1) + 513 * 10, None),
        ("resnet8", (1, 28, 28), {"width": 4, "norm": False}, body(1, 4, 1, False) + 33 * 10, None),
        ("resnet18", (3, 32, 32), {}, body(2, 20, 3, False) + 4 * 160 * 10, None),  # 2 x 2 pixels, no bias
        ("resnet18", (3, 17, 40), {"width": 4}, body(2, 4, 3, False) + 2 * 32 * 10, None),  # 3 x 5 pixels, pooled 1 x 2
    ],
)
def test_parameters(name, shape, options, derived, known):
    module = models.build(name, shape, 10, options)
    assert sum(leaf.numel() for leaf in module.parameters()) == derived == (known or derived)
    assert module.eval()(torch.zeros(2, *shape)).shape == (2, 10)


@pytest.mark.parametrize(("name", "depth"), [("resnet18_cifar", 2), ("resnet8", 1)])
def test_outputs_and_running_statistics_are_those_of_torchvisions_blocks(name, depth):
    module, x = make(name, (3, 16, 12))
    with rng.fork(2):
        theirs = ResNet(BasicBlock, [depth] * 4, num_classes=5)
        theirs.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        theirs.maxpool = theirs.maxpool if name == "resnet8" else nn.Identity()
    theirs = theirs.double()
    for ours, other in zip(module.state_dict().values(), theirs.state_dict().values(), strict=True):
        other.copy_(ours)
    for training in (True, False):  # evaluation uses the statistics of the pass before
        assert torch.allclose(module.train(training)(x), theirs.train(training)(x), atol=1e-9)
    for ours, other in zip(module.buffers(), theirs.buffers(), strict=True):
        assert torch.allclose(ours, other, atol=1e-9)


def test_initial_values_of_resnet18_are_drawn_layer_by_layer_in_order():
    # stored runs depend on names and order: stem, then for each block both convolutions and the shortcut, then the head
    with rng.fork(1):
        expected = {"stem": nn.Conv2d(3, 4, 3, bias=False)}
        for place, (a, b) in enumerate([(4, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)]):
            expected[f"blocks.{place}.conv1"] = nn.Conv2d(a, b, 3, bias=False)
            expected[f"blocks.{place}.conv2"] = nn.Conv2d(b, b, 3, bias=False)
            if a != b:
                expected[f"blocks.{place}.shortcut.0"] = nn.Conv2d(a, b, 1, bias=False)
        expected["head"] = nn.Linear(4 * 32, 5, bias=False)
    with rng.fork(1):
        ours = models.build("resnet18", (3, 32, 32), 5, {"width": 4}).state_dict()
    assert list(ours) == [f"{name}.weight" for name in expected]
    assert all(torch.equal(ours[f"{name}.weight"], layer.weight) for name, layer in expected.items())


def test_convolutions_of_resnet8_are_initialised_as_he_et_al():
    module, _ = make("resnet8", (3, 8, 8))
    wide = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d) and layer.weight.numel() > 10_000]
    assert len(wide) == 10  # the eight of the blocks and the two larger shortcuts
    for layer in wide:
        size = layer.kernel_size[0] ** 2 * layer.out_channels
        # five standard errors of a standard deviation: 5 / sqrt(2 n), below 3.5 % for n above 10,000
        assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / size), rel=0.035)


# d of a layer: nine inputs for each of a filter's channels in a 3 x 3 convolution, one in a shortcut
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("resnet8", [27, 18, 18, 18, 36, 2, 36, 72, 4, 72, 144, 8]),
        ("resnet18_cifar", [27, *[18] * 4, 18, 36, 2, 36, 36, 36, 72, 4, 72, 72, 72, 144, 8, 144, 144]),
    ],
)
def test_layers_heads_and_features(name, sizes):
    module, x = make(name, (3, 8, 8), width=2)
    model = Model(module, (3, 8, 8), [5, 3], multi_head=True)
    assert [layer.size for layer in model.layers] == sizes
    assert model.head(1) == ("head.weight@1", "head.bias@1")
    assert len(model.buffers(1)) == 3 * len(sizes)  # mean, variance and count of a normalisation for each convolution
    with model.evaluation():
        assert model.features(model.params, x, 1).shape == (2, 16)
        assert model.logits(model.params, x, 1).shape == (2, 3)
        assert model.outputs(model.params, x, 0, (0, 1)).shape == (2, 2, 5)


@pytest.mark.parametrize("name", NAMES)
def test_no_operation_overwrites_the_output_of_a_layer(name):
    module, x = make(name, (3, 16, 16), width=2, norm=True)
    outputs = []
    for layer in module.modules():
        if not list(layer.children()):
            layer.register_forward_hook(lambda _, __, output: outputs.append((output, output._version)))
    module(x)
    assert len(outputs) > 20 and all(output._version == version for output, version in outputs)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("resnet18", (3, 8, 8), {}, "at least 9 x 9 pixels, not 8 x 8"),
        ("resnet18", (3, 32, 16), {"stem_stride": 2}, "at least 17 x 17 pixels, not 32 x 16"),
        ("resnet18", (3, 32, 32), {"stem_stride": 0}, r"model\.stem_stride must be a whole number of at least 1"),
        ("resnet18_cifar", (32, 32), {}, r"needs images \(channels, height, width\)"),
        ("resnet18_cifar", (3, 8, 8), {"width": 0}, r"model\.width must be a whole number of at least 1, not 0"),
        ("resnet8", (64,), {}, r"needs images \(channels, height, width\)"),
        ("resnet8", (3, 8, 8), {"width": "64"}, r"model\.width must be a whole number, not '64'"),
    ],
)
def test_errors(name, shape, options, message):
    with pytest.raises(ConfigError, match=message):
        models.build(name, shape, 2, options)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_the_smallest_images_of_resnet18_leave_one_average(stride):
    side = 8 * stride + 1  # one pixel less is an error, see above
    module, x = make("resnet18", (1, side, side), width=2, stem_stride=stride)
    assert module.head.in_features == 16 and module(x).shape == (2, 5)
