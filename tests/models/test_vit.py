"""The vision transformer: number of parameters, torchvision's as the reference, layers, and second derivatives."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad
from torchvision.models import VisionTransformer

from cfl import models
from cfl.core import ConfigError, rng
from cfl.methods.subspace.layer_inputs import watch
from cfl.models import Model

SMALL = {"patch": 4, "width": 12, "depth": 2, "heads": 3}


def make(shape, outputs=5, **options):
    """A network in float64, and two images."""
    with rng.fork(1):
        module = models.build("vit_small", shape, outputs, {**SMALL, **options}).double()
        module.token.data.normal_()  # its initial value is 0
    return module, torch.randn(2, *shape, dtype=torch.float64, generator=rng.generator(2))


def size(channels, patches, patch=4, width=192, depth=6, outputs=10):
    """Parameters: patches, class token, positions, blocks, last normalisation, head.

    A block has weights of 3 + 1 + 4 + 4 widths squared, their biases (3 + 1 + 4 + 1) and two normalisations (2 each).
    """
    block = 12 * width**2 + 13 * width
    ends = (channels * patch**2 + 1) * width + width + (patches + 1) * width + 2 * width + (width + 1) * outputs
    return ends + depth * block


@pytest.mark.parametrize(
    ("shape", "options", "derived", "known"),
    [
        ((3, 32, 32), {}, size(3, 8 * 8), 2_693_578),
        ((1, 28, 28), {}, size(1, 7 * 7), None),
        ((1, 28, 14), {"patch": 7, "width": 8, "depth": 1, "heads": 2}, size(1, 4 * 2, 7, 8, 1), None),
    ],
)
def test_parameters(shape, options, derived, known):
    module = models.build("vit_small", shape, 10, options)
    assert sum(leaf.numel() for leaf in module.parameters()) == derived == (known or derived)
    assert module(torch.zeros(2, *shape)).shape == (2, 10)


def test_outputs_are_those_of_torchvision():
    module, x = make((3, 16, 16))
    theirs = VisionTransformer(16, 4, 2, 3, 12, 48, num_classes=5, norm_layer=partial(nn.LayerNorm, eps=1e-5)).double()
    renamed = {"token": "class_token", "positions": "encoder.pos_embedding"}
    renamed |= {"patches": "conv_proj", "norm": "encoder.ln", "head": "heads.head"}
    inner = {"norm1": "ln_1", "qkv": "self_attention.in_proj", "out": "self_attention.out_proj", "norm2": "ln_2"}
    inner |= {"mlp.0": "mlp.0", "mlp.3": "mlp.3"}
    for block in range(2):
        renamed |= {f"blocks.{block}.{a}": f"encoder.layers.encoder_layer_{block}.{b}" for a, b in inner.items()}
    state = {}
    for name, leaf in module.state_dict().items():
        layer, _, kind = name.rpartition(".")
        other = renamed[layer or name]
        state[other if not layer else f"{other}_{kind}" if layer.endswith("qkv") else f"{other}.{kind}"] = leaf
    theirs.load_state_dict(state)
    assert torch.allclose(module(x), theirs(x), atol=1e-12)


def test_layers_heads_and_features():
    module, x = make((1, 8, 12))
    model = Model(module, (1, 8, 12), [5, 3], multi_head=True)
    block = {"qkv": 12, "out": 12, "mlp.0": 12, "mlp.3": 48}
    expected = {"patches": 16, **{f"blocks.{i}.{name}": d for i in (0, 1) for name, d in block.items()}}
    assert {layer.name: layer.size for layer in model.layers} == expected
    assert model.head(1) == ("head.weight@1", "head.bias@1")
    assert model.features(model.params, x, 1).shape == (2, 12)
    assert model.logits(model.params, x, 1).shape == (2, 3)
    assert model.outputs(model.params, x, 0, (0, 1)).shape == (2, 2, 5)


def test_updates_orthogonal_to_the_inputs_of_the_layers_do_not_change_the_outputs():
    # subspace methods need every product with a weight in `Model.layers`
    module, x = make((3, 8, 8), width=24)
    x = x[:1]  # five tokens in 24 dimensions or more (four patches in 48)
    model = Model(module, (3, 8, 8), [5], multi_head=True)
    seen, after, update = {}, dict(model.params), rng.generator(3)
    with watch(model, model.layers, lambda layer, inputs: seen.update({layer.weight: inputs[0]})):
        before = model.logits(model.params, x, 0)
    for name, inputs in seen.items():
        basis = torch.linalg.qr(inputs.T).Q
        step = torch.randn(model.params[name].flatten(1).shape, dtype=torch.float64, generator=update)
        after[name] = after[name] + (step - step @ basis @ basis.T).reshape(after[name].shape)
    assert torch.allclose(model.logits(after, x, 0), before, atol=1e-10)
    assert not torch.allclose(model.logits(after, x + 1, 0), model.logits(model.params, x + 1, 0), atol=0.1)
    rest = {name for name in model.trainable(0) if name.endswith("weight") and name not in seen}
    assert rest == {"norm.weight", *(f"blocks.{i}.norm{j}.weight" for i in (0, 1) for j in (1, 2))}


def test_second_derivatives_equal_finite_differences():
    module, x = make((1, 8, 8))
    params = {name: leaf.detach() for name, leaf in module.named_parameters()}

    def first(weight):
        def loss(weight):
            return functional_call(module, {**params, "blocks.0.qkv.weight": weight}, (x,)).square().sum()

        return grad(loss)(weight)

    weight = params["blocks.0.qkv.weight"]
    direction = torch.randn(weight.shape, dtype=torch.float64, generator=rng.generator(4))
    exact = grad(lambda weight: (first(weight) * direction).sum())(weight)
    step = 1e-5 * direction  # central differences: error of the order of 1e-10
    assert torch.allclose(exact, (first(weight + step) - first(weight - step)) / 2e-5, atol=1e-6)
    assert exact.abs().max() > 1e-3


def test_dropout_layers_are_active_in_training_only():
    module, x = make((1, 8, 8), dropout=0.5)
    with rng.fork(5):
        assert not torch.allclose(module(x), module(x))
    plain, _ = make((1, 8, 8))
    rates = [layer.p for layer in module.modules() if isinstance(layer, nn.Dropout)]
    assert rates == [0.5] * 5  # after the positions; in each of two blocks, in the perceptron and after both halves
    assert torch.equal(module.eval()(x), plain(x))


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((64,), {}, r"needs images \(channels, height, width\)"),
        ((3, 30, 32), {}, r"images of 30 x 32 pixels cannot be cut into patches of 4 x 4; set model\.patch"),
        ((3, 32, 30), {}, "images of 32 x 30 pixels cannot be cut"),
        ((3, 2, 2), {}, "images of 2 x 2 pixels cannot be cut"),
        ((3, 8, 8), {"heads": 5}, r"model\.width must be a multiple of model\.heads, but 192 is not a multiple of 5"),
        ((3, 8, 8), {"depth": 0}, r"model\.depth must be a whole number of at least 1, not 0"),
        ((3, 8, 8), {"dropout": 2}, r"dropout probability has to be between 0 and 1"),
    ],
)
def test_errors(shape, options, message):
    with pytest.raises(ConfigError, match=message):
        models.build("vit_small", shape, 2, options)
