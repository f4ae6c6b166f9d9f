"""Weights from a folder: the logits of transformers, timm and torchvision, runs that start from them, and errors."""

import json
import os
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision.models import VisionTransformer

import cfl
from cfl import models
from cfl.assembly.resolve import dump, load
from cfl.core import ConfigError, rng
from cfl.models import pretrained
from tests import toy

MINILM = Path(os.environ.get("CFL_MINILM", "/nowhere"))  # folder of all-MiniLM-L6-v2
CONFIG = {
    "model_type": "bert", "vocab_size": 20, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 16, "max_position_embeddings": 10, "hidden_dropout_prob": 0.0, "hidden_act": "gelu",
}  # fmt: skip


def bert_folder(folder, prefix="", change=None, **config):
    """A folder with the weights of our BERT, as transformers names them. change: of the tensors by name."""
    options = {"layers": 2, "width": 12, "heads": 3, "intermediate": 16, "vocabulary": 20}
    with rng.fork(2):
        module = models.build("bert_tiny", (2, 10), 5, options)
        for leaf in module.parameters():
            leaf.data.add_(0.3 * torch.randn_like(leaf))
    leaves = {name if "classifier" in name else prefix + name: leaf for name, leaf in module.state_dict().items()}
    return write(folder, (change or dict)(leaves), {**CONFIG, **config})


def write(folder, leaves, config=None):
    folder.mkdir(exist_ok=True)
    save_file({name: leaf.contiguous() for name, leaf in leaves.items()}, folder / "model.safetensors")
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def loaded(folder, model, input_shape, outputs=5, **options):
    """The network from a folder, in evaluation mode, its head from a generator."""
    options = models.filled(model, options, folder)
    with rng.fork(9):
        module = models.build(model, input_shape, outputs, options)
    head = {"bert_tiny": "classifier", "vit_small": "head"}[model]
    wanted = {name: leaf for name, leaf in module.named_parameters() if not name.startswith(head)}
    leaves = pretrained.tensors(folder, options, input_shape, wanted)
    module.load_state_dict({**module.state_dict(), **leaves})
    return module.eval()


def with_head(module, head):
    """The network with the weights of another head."""
    own = list(module.children())[-1]
    own.load_state_dict(head.state_dict())
    return module


# --- the networks of other packages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification", "BertForMaskedLM"])
def test_a_bert_that_transformers_wrote_gives_its_hidden_states(kind, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(**CONFIG, attention_probs_dropout_prob=0.0, num_labels=5)
    with rng.fork(3):
        theirs = getattr(transformers, kind)(config).eval()
        theirs.save_pretrained(tmp_path)
    x = toy.texts(4)
    module = loaded(str(tmp_path), "bert_tiny", (2, 8))
    if kind == "BertForSequenceClassification":
        expected = theirs(x[:, 0], x[:, 1]).logits
        found = with_head(module, theirs.classifier)(x)
    else:
        hidden = (theirs if kind == "BertModel" else theirs.bert)(x[:, 0], x[:, 1]).last_hidden_state
        expected = (hidden * x[:, 1, :, None]).sum(1) / x[:, 1].sum(1, keepdim=True)
        module = loaded(str(tmp_path), "bert_tiny", (2, 8), outputs=12, pooling="mean")
        module.classifier = nn.Identity()
        found = module(x)
    assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("size", "channels"), [(16, 3), (24, 1)])
def test_a_vision_transformer_of_timm_gives_its_logits(size, channels, tmp_path):
    timm = pytest.importorskip("timm", reason="timm is not installed")
    make = partial(timm.models.VisionTransformer, patch_size=4, in_chans=channels, num_classes=5, embed_dim=128,
                   depth=2, num_heads=2)  # fmt: skip
    with rng.fork(4):
        theirs = make(img_size=16)
        for leaf in theirs.parameters():
            leaf.data.add_(0.1 * torch.randn_like(leaf))
    folder = write(tmp_path, theirs.state_dict(), {"architecture": "vit_tiny_patch4_16", "num_classes": 5})
    larger = make(img_size=size).eval()  # whose position vectors timm interpolates when it loads them
    larger.load_state_dict(
        timm.models.vision_transformer.checkpoint_filter_fn(dict(theirs.state_dict()), larger, antialias=True)
    )
    module = with_head(loaded(folder, "vit_small", (channels, size, size)), theirs.head)
    x = toy.random(2, channels, size, size).float()
    assert torch.allclose(module(x), larger(x), atol=1e-5)


def test_a_vision_transformer_of_torchvision_gives_its_logits(tmp_path):
    with rng.fork(5):
        theirs = VisionTransformer(16, 4, 2, 2, 128, 512, num_classes=5).eval()
        theirs.heads.head.weight.data.normal_()  # its initial value is 0
    module = loaded(write(tmp_path, theirs.state_dict()), "vit_small", (3, 16, 16))
    x = toy.random(2, 3, 16, 16).float()
    assert torch.allclose(with_head(module, theirs.heads.head)(x), theirs(x), atol=1e-5)


@pytest.mark.skipif(not (MINILM / "model.safetensors").exists(), reason="CFL_MINILM names no folder of MiniLM")
def test_minilm_gives_the_hidden_states_of_transformers():
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs, x = transformers.BertModel.from_pretrained(MINILM).eval(), toy.texts(3, length=24, words=30000)
    hidden = theirs(x[:, 0], x[:, 1]).last_hidden_state
    module = loaded(str(MINILM), "bert_tiny", (2, 24), pooling="mean")
    module.classifier = nn.Identity()
    assert torch.allclose(module(x), (hidden * x[:, 1, :, None]).sum(1) / x[:, 1].sum(1, True), atol=1e-5)


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "bert."])
def test_a_run_starts_from_a_folder(prefix, tmp_path):
    folder = bert_folder(tmp_path / "weights", prefix)
    options = (f"model.weights={folder}", "local.lr=0.1")
    config = toy.config(*options, method="fedavg")
    assert config.model.name == "bert_tiny" and config.model.options["width"] == 12
    result = cfl.run(config, stream=toy.text_stream())
    start = {
        name.removeprefix("bert."): leaf for name, leaf in load_file(tmp_path / "weights/model.safetensors").items()
    }
    for name, leaf in result.model.params.items():
        assert "classifier" in name or torch.equal(leaf, start[name][: len(leaf)]), name  # 8 of 10 positions
    heads = {name for name in result.model.params if "classifier" in name}
    assert heads == {f"classifier.{kind}@{task}" for kind in ("weight", "bias") for task in (0, 1)}


@pytest.mark.slow
def test_adapters_go_beside_the_layers_of_a_folder_on_all_engines(tmp_path):
    folder = bert_folder(tmp_path / "weights")
    options = (f"model.weights={folder}", "model.adapter=lora", "model.adapter_targets=[query,value]", "local.lr=0.5")
    stream, start = toy.text_stream(), load_file(tmp_path / "weights/model.safetensors")
    found = {}
    for engine in ("loop", "vmapped", "pool"):
        result = cfl.run(toy.config(*options, f"engine={engine}", method="fot"), stream=stream)
        query = "encoder.layer.1.attention.self.query"
        assert torch.equal(result.params[f"{query}.base.weight"], start[f"{query}.weight"])
        assert result.params[f"{query}.b.weight"].any()
        assert {layer.path.rpartition(".")[0] for layer in result.model.layers if "encoder" in layer.path} == {
            f"encoder.layer.{i}.attention.self.{name}" for i in (0, 1) for name in ("query", "value")
        }
        found[engine] = toy.flat(result.params)
    assert torch.allclose(found["loop"], found["vmapped"], atol=1e-5)
    assert torch.allclose(found["loop"], found["pool"], atol=1e-5)


def test_nodes_of_a_federation_get_the_weights_from_the_server(tmp_path):
    folder = bert_folder(tmp_path / "weights")
    options = (f"model.weights={folder}", "model.adapter=lora", "rounds=1")
    here = cfl.run(toy.config(*options, method="fedavg"), stream=toy.text_stream())
    remote = toy.config(*options, "engine=flower", "flower.address=in-process", "workers=1", method="fedavg")
    there = cfl.run(remote, stream=toy.text_stream())
    assert torch.allclose(toy.flat(there.params), toy.flat(here.params), atol=1e-6)


def test_a_resumed_run_notices_other_weights(tmp_path):
    folder = bert_folder(tmp_path / "weights")
    config = toy.config(f"model.weights={folder}", method="fedavg")
    first = cfl.run(config, stream=toy.text_stream(), output=tmp_path / "run")
    again = cfl.run(config, stream=toy.text_stream(), output=tmp_path / "run", resume=True)
    assert torch.equal(toy.flat(again.params), toy.flat(first.params))
    bert_folder(tmp_path / "weights", change=lambda leaves: {name: 2 * leaf for name, leaf in leaves.items()})
    with pytest.raises(cfl.errors.CheckpointError, match=r"the model in '.*weights' changed since the run began"):
        cfl.run(config, stream=toy.text_stream(), output=tmp_path / "run", resume=True)


def test_a_run_before_comes_first_and_the_folder_gives_the_sizes(tmp_path):
    options = [f"model.weights={bert_folder(tmp_path / 'weights')}"]
    first = cfl.run(toy.config(*options, method="fedavg"), stream=toy.text_stream(), output=tmp_path / "first")
    second = cfl.run(toy.config(*options, f"start={tmp_path / 'first'}", method="fedavg"), stream=toy.text_stream())
    assert torch.equal(toy.flat(second.model.params), toy.flat(first.params))


def test_a_resolved_configuration_needs_the_folder_only_for_the_weights(tmp_path):
    folder = bert_folder(tmp_path / "weights")
    data = dump(toy.config(f"model.weights={folder}", method="fedavg"))
    (tmp_path / "weights").rename(tmp_path / "moved")
    assert dump(load(data)) == data and data["model"]["options"]["heads"] == 3


def test_other_weights_in_a_later_layer_bring_their_own_sizes(tmp_path):
    first = toy.config(f"model.weights={bert_folder(tmp_path / 'first')}", method="fedavg")
    (tmp_path / "config.yaml").write_text(json.dumps(dump(first)))
    theirs = VisionTransformer(16, 4, 1, 1, 64, 256)
    vit = write(tmp_path / "vit", theirs.state_dict())
    config = cfl.resolve(file=tmp_path / "config.yaml", overrides=[f"model.weights={vit}"])
    assert (config.model.name, config.model.options["width"]) == ("vit_small", 64)
    narrow = cfl.resolve("cifar10", overrides=[f"model.weights={vit}", "model.dropout=0.2"])
    assert narrow.model.options == {"patch": 4, "width": 64, "depth": 1, "heads": 1, "dropout": 0.2, "eps": 1e-6}


# --- errors -----------------------------------------------------------------------------------------------------------


def without(*parts):
    """A change of tensors that drops those with one of the parts in their name."""
    return lambda leaves: {name: leaf for name, leaf in leaves.items() if not any(part in name for part in parts)}


@pytest.mark.parametrize(
    ("config", "change", "options", "message"),
    [
        ({"model_type": "roberta"}, None, [], r"in '.*', config.json has model_type=roberta, but bert_tiny has model_"),
        ({"hidden_act": "relu"}, None, [], r"config.json has hidden_act=relu, but bert_tiny has hidden_act=gelu"),
        ({}, without("value.bias"), [], r"safetensors' does not fit: it lacks encoder.layer.0.*self.value.bias, enc"),
        ({}, lambda leaves: {**leaves, "extra": torch.ones(1)}, [], "does not fit: the network does not have extra"),
        ({"vocab_size": 21}, None, [], r"'embeddings.word_embeddings.weight' has shape \(20, 12\) there, and \(21, 12"),
        ({}, without("pooler"), ["model.pooling=cls"], r"it lacks pooler.dense.weight, pooler.dense.bias"),
        ({}, without("word_embeddings"), [], r"has none of the tensors .*word_embeddings.weight \(bert_tiny\), patch_"),
        ({}, None, ["model.name=vit_small"], r"has weights of bert_tiny; set model.name=bert_tiny"),
        ({}, lambda leaves: {**leaves, (p := "embeddings.position_embeddings.weight"): leaves[p][:6]}, [],
         "texts have up to 8 tokens, but the model has 6 positions"),
    ],
)  # fmt: skip
def test_faults_of_a_folder_are_named(config, change, options, message, tmp_path):
    folder = bert_folder(tmp_path / "weights", change=change, **config)
    with pytest.raises(ConfigError, match=message):
        cfl.run(toy.config(f"model.weights={folder}", *options, method="fedavg"), stream=toy.text_stream())


def test_a_model_without_pooler_takes_the_mean(tmp_path):
    folder = bert_folder(tmp_path / "weights", change=without("pooler"))
    assert toy.config(f"model.weights={folder}", method="fedavg").model.options["pooling"] == "mean"


def test_unreadable_folders(tmp_path):
    with pytest.raises(ConfigError, match=r"model.weights: there is no file '.*nowhere/model.safetensors'; write one"):
        toy.config(f"model.weights={tmp_path / 'nowhere'}")
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(ConfigError, match=r"model.weights: '.*model.safetensors' cannot be read"):
        toy.config(f"model.weights={tmp_path}")
    bert_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.weights: '.*config.json' cannot be read"):
        toy.config(f"model.weights={tmp_path}")
    bert_folder(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config.json, with the sizes of a BERT, has no num_hidden_layers, hidden_s"):
        toy.config(f"model.weights={tmp_path}")
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"config.json' must hold a JSON object"):
        toy.config(f"model.weights={tmp_path}")


def test_a_network_of_the_users_own_has_no_folder(tmp_path):
    config = toy.config(f"model.weights={bert_folder(tmp_path)}", method="fedavg")
    with pytest.raises(ConfigError, match="model.weights is for a network by name; load the weights into your own"):
        cfl.run(config, stream=toy.stream(), model=nn.Sequential(nn.Linear(8, 2)))


def test_names_of_a_wrapped_vision_transformer_are_refused(tmp_path):
    save_file({"module.patch_embed.proj.weight": torch.zeros(8, 3, 4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"'patch_embed.proj.weight' has a prefix; save the state_dict"):
        pretrained.sizes(str(tmp_path), "vit_small")
