"""BERT: number of parameters, the reference of transformers, padding, layers, and equal engines."""

import pytest
import torch
from torch import nn

import cfl
from cfl import models
from cfl.core import ConfigError, rng
from cfl.methods.subspace.layer_inputs import watch
from cfl.models import Model
from tests import toy

SMALL = {"layers": 2, "width": 12, "heads": 3, "intermediate": 20, "vocabulary": 30, "dropout": 0.0}
RUN = ("model.name=bert_tiny", *(f"model.{name}={value}" for name, value in SMALL.items()))


def make(length=8, outputs=3, **options):
    """A network in float64, with drawn biases and normalisation, which start at constants."""
    with rng.fork(1):
        module = models.build("bert_tiny", (2, length), outputs, {**SMALL, **options}).double()
        for leaf in module.parameters():
            leaf.data.add_(0.3 * torch.randn_like(leaf))
    return module.eval()


def handle(module, length=8):
    return Model(module, (2, length), [3, 3], multi_head=True, dtype=torch.float32)


def test_parameters():
    # google's BERT of 2 x 128 with a head for two classes has 4,386,178: embeddings of 30522 words, 512 positions and
    # 2 types with a normalisation; in a block 4 + 2 * 4 squares of the width, their biases and two normalisations;
    # pooler and head.
    width = 128
    block = 12 * width**2 + (4 + 4 + 1) * width + 4 * width
    derived = (30522 + 512 + 2 + 2) * width + 2 * block + (width + 1) * width + (width + 1) * 2
    module = models.build("bert_tiny", (2, 512), 2, {})
    assert sum(leaf.numel() for leaf in module.parameters()) == derived == 4_386_178


@pytest.mark.parametrize("separator", [None, 7])
def test_outputs_are_those_of_transformers(separator):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=12, num_hidden_layers=2, num_attention_heads=3, intermediate_size=20,
        max_position_embeddings=8, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module, x = make(separator=separator), toy.texts(6)
    theirs = transformers.BertForSequenceClassification(config).double().eval()
    theirs.load_state_dict({
        name if name.startswith("classifier") else f"bert.{name}": leaf for name, leaf in module.state_dict().items()
    })  # fmt: skip
    types = torch.zeros(6, 8, dtype=torch.long)
    if separator is not None:
        x[:, 0, 2] = separator  # the second text begins at the fourth token
        types[:, 3:] = 1
    expected = theirs(input_ids=x[:, 0], attention_mask=x[:, 1], token_type_ids=types).logits
    assert torch.allclose(module(x), expected, atol=1e-10)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_padding_does_not_change_the_outputs(pooling):
    module, x = make(pooling=pooling), toy.texts(4)
    x[:, :, 5:] = 0
    noise = x.clone()
    noise[:, 0, 5:] = 9  # ids at padded positions
    assert torch.allclose(module(x), module(x[:, :, :5]), atol=1e-12)
    assert torch.allclose(module(x), module(noise), atol=1e-12)
    assert not torch.allclose(module(x), module(x[:, :, :4]), atol=1e-3)
    assert module(torch.zeros(2, 2, 8)).isfinite().all()  # texts that are all padding, as fill up a block


def test_the_inputs_of_a_layer_give_its_outputs_and_are_zero_at_padding():
    model, x = handle(make()), toy.texts(4)
    seen, outputs = {}, {}
    hooks = [
        model.module.get_submodule(layer.path).register_forward_hook(
            lambda module, args, out, path=layer.path: outputs.update({path: out})
        )
        for layer in model.layers
    ]
    with watch(model, model.layers, lambda layer, inputs: seen.update({layer.path: inputs})):
        model.logits(model.params, x, 0)
    for hook in hooks:
        hook.remove()
    block = ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
             "intermediate.dense", "output.dense"]  # fmt: skip
    assert list(seen) == [f"encoder.layer.{i}.{name}" for i in (0, 1) for name in block] + ["pooler.dense"]
    for path, inputs in seen.items():
        layer = model.module.get_submodule(path)
        expected = inputs @ layer.weight.T + layer.bias
        assert torch.allclose(expected.reshape(outputs[path].shape), outputs[path], atol=1e-12)
        if path != "pooler.dense":
            assert inputs[x[:, 1] == 0].eq(0).all() and inputs[x[:, 1] == 1].ne(0).any(1).all()


def test_updates_orthogonal_to_the_inputs_of_the_layers_do_not_change_the_outputs():
    model = handle(make(width=24, intermediate=30))
    x = toy.texts(1, seed=3)  # up to 8 tokens in 24 dimensions or more
    seen, after, update = {}, dict(model.params), rng.generator(3)
    with watch(model, model.layers, lambda layer, inputs: seen.update({layer.weight: inputs[0]})):
        before = model.logits(model.params, x, 0)
    for name, inputs in seen.items():
        left, energies, _ = torch.linalg.svd(inputs.T, full_matrices=False)
        basis = left[:, energies > 1e-10]
        step = torch.randn(model.params[name].shape, dtype=torch.float64, generator=update)
        after[name] = after[name] + step - step @ basis @ basis.T
    assert torch.allclose(model.logits(after, x, 0), before, atol=1e-10)
    other = toy.texts(1, seed=4)
    assert not torch.allclose(model.logits(after, other, 0), model.logits(model.params, other, 0), atol=0.1)
    rest = {name for name in model.trainable(0) if name.endswith("weight") and name not in seen}
    assert all("embeddings" in name or "LayerNorm" in name for name in rest - {"classifier.weight@0"})


def test_dropout_and_heads():
    module = models.build("bert_tiny", (2, 8), 3, {**SMALL, "dropout": 0.5})
    rates = [layer.p for layer in module.modules() if isinstance(layer, nn.Dropout)]
    assert rates == [0.5] * 7  # of embeddings and head; in each of two blocks, of attention and of both halves
    x = toy.texts(2)
    with rng.fork(5):
        assert not torch.allclose(module.train()(x), module(x))
    assert torch.equal(module.eval()(x), module(x))
    assert models.draws("bert_tiny", {}) and not models.draws("bert_tiny", {"dropout": 0.0})
    assert handle(make()).head(1) == ("classifier.weight@1", "classifier.bias@1")


@pytest.mark.slow
@pytest.mark.parametrize("engine", toy.quick("vmapped", of=["vmapped", "pool", "pool+vmapped"]))
def test_engines_agree(engine):
    # clients of unequal size, so that a block has texts that are all padding
    options = (*RUN, "local.lr=0.5", "partition.name=dirichlet", "rounds=1")
    stream = toy.text_stream()
    plain = cfl.run(toy.config(*options, method="fot"), stream=stream)
    other = cfl.run(toy.config(*options, f"engine={engine}", "workers=2", method="fot"), stream=stream)
    assert torch.allclose(toy.flat(plain.params), toy.flat(other.params), atol=1e-5)
    assert not torch.allclose(toy.flat(plain.params), toy.flat(plain.model.params), atol=1e-2)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((3, 32, 32), {}, r"needs token ids and their mask, of shape \(2, length\), not \(3, 32, 32\)"),
        ((2, 8), {"heads": 5}, r"model\.width must be a multiple of model\.heads, but 12 is not a multiple of 5"),
        ((2, 8), {"layers": 0}, r"model\.layers must be a whole number of at least 1, not 0"),
        ((2, 8), {"pooling": "max"}, r"model\.pooling must be cls or mean, not max"),
        ((2, 8), {"vocabluary": 5}, r"unknown option 'model\.vocabluary'; did you mean 'model\.vocabulary'"),
    ],
)
def test_errors(shape, options, message):
    with pytest.raises(ConfigError, match=message):
        models.build("bert_tiny", shape, 2, {**SMALL, **options})
