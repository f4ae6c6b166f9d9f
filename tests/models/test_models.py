"""The built-in models: parameter counts and input sizes of the papers, and error messages."""

from typing import Literal

import pytest
import torch

from cfl import models
from cfl.core import ConfigError, plugins
from cfl.models import Model


def count(params, *names):
    return sum(leaf.numel() for name, leaf in params.items() if not names or name in names)


# Published counts: with w the widths and H heads of c classes,
# mlp        785 * 400 + 2 * 401 * 400 + 401 * 10
# alexnet_cl 3*64*16 + 64*128*9 + 128*256*4 + 1024*2048 + 2048*2048 + 10 * 2048 * 10
# resnet18   stem 27 w, then per stage of widths (a, b): 9ab + 3 * 9bb, and ab for the 1 x 1 shortcut from stage 2 on
RESNET_BODY = {w: 27 * w + 4 * 9 * w * w + sum(9 * a * 2 * a + 3 * 9 * 4 * a * a + 2 * a * a for a in (w, 2 * w, 4 * w))
               for w in (20, 32)}  # fmt: skip
NORMS_32 = 2 * (32 + 4 * 32 + 5 * (64 + 128 + 256))  # weight and bias of 1 + 4 + 3 * 5 normalisation layers

CASES = {
    "mlp": (
        ("mlp", (1, 28, 28), {"hidden": [400, 400, 400], "dropout": [0.2, 0.5, 0.5]}),
        [10] * 10,
        False,
        785 * 400 + 2 * 401 * 400 + 401 * 10,
        638_810,
        [784, 400, 400, 400],
    ),
    "alexnet": (
        ("alexnet_cl", (3, 32, 32), {}),
        [10] * 10,
        True,
        3 * 64 * 16 + 64 * 128 * 9 + 128 * 256 * 4 + 1024 * 2048 + 2048 * 2048 + 10 * 2048 * 10,
        6_704_128,
        [48, 576, 512, 1024, 2048],
    ),
    "alexnet-16": (  # every width a quarter
        ("alexnet_cl", (3, 32, 32), {"width": 16}),
        [10] * 10,
        True,
        3 * 16 * 16 + 16 * 32 * 9 + 32 * 64 * 4 + 256 * 512 + 512 * 512 + 10 * 512 * 10,
        457_984,  # the same sum; not a published network
        [48, 144, 128, 256, 512],
    ),
    "resnet-20": (
        ("resnet18", (3, 32, 32), {"width": 20}),
        [10] * 5,
        True,
        RESNET_BODY[20] + 5 * 640 * 10,
        1_122_140,
        [27, *[180] * 4, 180, 360, 20, 360, 360, 360, 720, 40, 720, 720, 720, 1440, 80, 1440, 1440],
    ),
    "resnet-32": (
        ("resnet18", (3, 84, 84), {"width": 32, "stem_stride": 2, "norm": True}),
        [5] * 20,
        True,
        RESNET_BODY[32] + NORMS_32 + 20 * 2304 * 5,
        3_025_440,
        [27, *[288] * 4, 288, 576, 32, 576, 576, 576, 1152, 64, 1152, 1152, 1152, 2304, 128, 2304, 2304],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_parameter_counts_and_projected_sizes(case):
    (name, shape, options), classes, multi_head, derived, published, sizes = CASES[case]
    module = models.build(name, shape, classes[0], options)
    model = Model(module, shape, classes, multi_head=multi_head, norm_stats="batch")
    assert count(model.params) == derived == published
    assert [layer.size for layer in model.layers] == sizes
    assert model.buffers(0) == ()
    assert model.logits(model.params, torch.zeros(2, *shape), 1).shape == (2, classes[1])


def test_every_model_gives_finite_gradients_to_all_parameters():
    for name, shape, options in (
        ("mlp", (3, 8, 8), {}),
        ("alexnet_cl", (3, 32, 32), {"dropout": [0, 0, 0, 0]}),
        ("resnet18", (1, 32, 32), {"width": 4, "norm": True}),
    ):
        torch.manual_seed(0)
        module = models.build(name, shape, 4, options)
        module(torch.randn(3, *shape)).square().sum().backward()
        for leaf_name, leaf in module.named_parameters():
            assert leaf.grad is not None and torch.isfinite(leaf.grad).all(), (name, leaf_name)
            assert leaf.grad.abs().max() > 0, (name, leaf_name)


@pytest.mark.parametrize(
    ("name", "shape", "options", "message"),
    [
        ("mpl", (8,), {}, r"unknown model 'mpl'; did you mean 'mlp'\?"),
        ("mlp", (8,), {"hiden": [3]}, r"unknown option 'model\.hiden'; did you mean 'model\.hidden'\?"),
        ("mlp", (8,), {"dropout": [0.1]}, r"model 'mlp' cannot be built.*a rate for each of the 2 hidden layers"),
        ("alexnet_cl", (3, 8, 8), {}, r"model 'alexnet_cl' cannot be built for inputs of shape \(3, 8, 8\)"),
        ("resnet18", (64,), {}, r"model 'resnet18' cannot be built for inputs of shape \(64,\)"),
    ],
)
def test_errors(name, shape, options, message):
    with pytest.raises(ConfigError, match=message):
        models.build(name, shape, 2, options)


def test_alexnet_takes_images_that_are_not_square():
    module = models.build("alexnet_cl", (1, 19, 27), 3, {"width": 2})
    assert module[13].in_features == 4 * 2 * 1 * 2  # sides: 19, 8, 3, 1 and 27, 12, 5, 2
    assert module(torch.zeros(2, 1, 19, 27)).shape == (2, 3)


def conv(input_shape, outputs, channels: int, kind: Literal["wide", "deep"] = "wide", drop: int = None, free=None):
    """A builder with annotations; the default of `drop` does not fit its own."""
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(8 * int(channels), outputs))


def unreadable(input_shape, outputs, size: "Missing" = 3):  # noqa: F821
    return torch.nn.Linear(8, outputs)


@pytest.fixture
def own_models(monkeypatch):
    plugins.models.names()
    monkeypatch.setattr(
        plugins.models, "_items", dict(plugins.models._items) | {"conv": conv, "unreadable": unreadable}
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": "x"}, r"model\.channels must be a whole number, not 'x'"),
        ({"channels": 1.5}, r"model\.channels must be a whole number, not 1\.5"),
        ({"channels": 1, "kind": "depe"}, r"unknown value of model\.kind 'depe'; did you mean 'deep'\?"),
        ({"channels": 1, "drop": "x"}, r"model\.drop must be a whole number, not 'x'"),
    ],
)
def test_options_are_checked_against_the_annotations_of_a_builder(options, message, own_models):
    with pytest.raises(ConfigError, match=message):
        models.filled("conv", options)


def test_values_that_fit_and_options_without_annotations_are_taken_as_they_are(own_models):
    options = {"channels": 1, "kind": "deep", "drop": None, "free": "any"}  # as config.yaml has them
    assert models.filled("conv", options) == options
    assert models.filled("unreadable", {"size": "any"}) == {"size": "any"}
    assert models.filled("bert_tiny", {"vocabulary": "none"})["vocabulary"] is None
    assert models.filled("mlp", {"hidden": (8, 8), "dropout": [0, 0.5]}) == {"hidden": (8, 8), "dropout": [0, 0.5]}


def test_an_option_of_another_model_names_that_model(own_models):
    with pytest.raises(
        ConfigError, match="model 'mlp' has no option 'channels'; it has hidden, dropout; 'conv' has it"
    ):
        models.filled("mlp", {"channels": 3})
    with pytest.raises(
        ConfigError, match="'mlp' has no option 'width'; .*; 'alexnet_cl', 'bert_tiny', 'cnn', .* have it"
    ):
        models.filled("mlp", {"width": 3})
    with pytest.raises(ConfigError, match="model 'mlp' has no option 'foo'; it has hidden, dropout$"):
        models.filled("mlp", {"foo": 3})


def test_an_unknown_option_is_named_beside_models_that_cannot_be_read(monkeypatch):
    def options_of(name):
        if name == "broken":
            raise ConfigError("model 'broken' cannot be loaded")
        return max if name == "without-signature" else original(name)

    original, names = plugins.models.get, [*plugins.models.names(), "broken", "without-signature"]
    monkeypatch.setattr(plugins.models, "get", options_of)
    monkeypatch.setattr(plugins.models, "names", lambda: names)
    with pytest.raises(ConfigError, match=r"unknown option 'model.dorpout'; did you mean 'model.dropout'\?"):
        models.filled("mlp", {"dorpout": 1})
