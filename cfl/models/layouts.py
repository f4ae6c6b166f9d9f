"""How files of pretrained weights are laid out: what a file's tensors are called, and the sizes that follow from them.

Three layouts: BERT models (as `transformers` writes them, with or without the prefix "bert."), and vision transformers
as timm and torchvision write them.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from cfl.core import ConfigError, Tree
from cfl.models.bert import EPS

Shapes = Mapping[str, tuple[int, ...]]
_POSITIONS = "embeddings.position_embeddings.weight"


class Layout(Protocol):
    """model: name of the network that takes the weights; mark: end of the name of a tensor that only this layout has;
    left_out: beginnings of the names, in the network, of tensors that it may leave out, such as those of heads."""

    model: str
    mark: str
    left_out: tuple[str, ...]

    def renamed(self, name: str) -> str:
        """Name in the network of a tensor of the file."""
        ...

    def sizes(self, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
        """Options of the network's builder. shapes: by name in the network; config: content of config.json, or empty.

        Raises ConfigError for a network of this family that the builder cannot make.
        """
        ...

    def fitted(self, leaves: Tree, options: Mapping[str, Any], input_shape: Sequence[int]) -> Tree:
        """The tensors, by name in the network, for inputs of another shape. Raises ConfigError if that cannot be."""
        ...


class Bert(Layout):
    """config.json: the sizes; file: at least as many positions as a text may have tokens."""

    model, mark = "bert_tiny", "embeddings.word_embeddings.weight"
    left_out = ("classifier.", "cls.", "qa_outputs.", "fit_dense", "pooler.", "embeddings.position_ids")

    _OPTIONS = {
        "layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
        "intermediate": "intermediate_size", "vocabulary": "vocab_size", "dropout": "hidden_dropout_prob",
    }  # fmt: skip
    _KINDS = {"model_type": "bert", "hidden_act": "gelu", "position_embedding_type": "absolute", "layer_norm_eps": EPS}

    def renamed(self, name: str) -> str:
        return name.removeprefix("bert.").replace("LayerNorm.gamma", "LayerNorm.weight").replace(
            "LayerNorm.beta", "LayerNorm.bias"
        )  # fmt: skip

    def sizes(self, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
        for name, own in self._KINDS.items():
            if (given := config.get(name, own)) != own:
                raise ConfigError(f"config.json has {name}={given}, but {self.model} has {name}={own}")
        if lacking := [name for name in self._OPTIONS.values() if name not in config]:
            raise ConfigError(f"config.json, with the sizes of a BERT, has no {', '.join(lacking)}")
        pooler = {} if "pooler.dense.weight" in shapes else {"pooling": "mean"}
        return {option: config[name] for option, name in self._OPTIONS.items()} | pooler

    def fitted(self, leaves: Tree, options: Mapping[str, Any], input_shape: Sequence[int]) -> Tree:
        if _POSITIONS not in leaves:
            return leaves
        longest, length = len(leaves[_POSITIONS]), input_shape[1]
        if length > longest:
            raise ConfigError(f"texts have up to {length} tokens, but the model has {longest} positions; cut the texts")
        return {**leaves, _POSITIONS: leaves[_POSITIONS][:length]}


class _ViT(Layout):
    """The position vectors of the file's grid of patches are interpolated to the grid of the run's images."""

    model, left_out = "vit_small", ("head.",)
    names: tuple[tuple[str, str], ...]  # expressions in the file's names, and what stands for them in the network's

    def renamed(self, name: str) -> str:
        for old, new in self.names:
            name = re.sub(old, new, name)
        return name

    def sizes(self, shapes: Shapes, config: Mapping[str, Any]) -> dict[str, Any]:
        if "patches.weight" not in shapes:
            raise ConfigError(f"'{self.mark}' has a prefix; save the state_dict of the network itself")
        width, _, patch, _ = shapes["patches.weight"]
        depth = len({name.split(".")[1] for name in shapes if name.startswith("blocks.")})
        # All published sizes up to ViT-L have heads of 64 numbers; no tensor and no file tells.
        return {"patch": patch, "width": width, "depth": depth, "heads": max(1, width // 64), "eps": 1e-6}

    def fitted(self, leaves: Tree, options: Mapping[str, Any], input_shape: Sequence[int]) -> Tree:
        grid = input_shape[1] // options["patch"], input_shape[2] // options["patch"]
        return {**leaves, "positions": resampled(leaves["positions"], grid)} if "positions" in leaves else leaves


class Timm(_ViT):
    mark = "patch_embed.proj.weight"
    names = (
        (r"^cls_token", "token"), (r"^pos_embed", "positions"), (r"^patch_embed\.proj", "patches"),
        (r"attn\.qkv", "qkv"), (r"attn\.proj", "out"), (r"mlp\.fc1", "mlp.0"), (r"mlp\.fc2", "mlp.3"),
    )  # fmt: skip


class Torchvision(_ViT):
    mark = "conv_proj.weight"
    names = (
        (r"^class_token", "token"), (r"^encoder\.pos_embedding", "positions"), (r"^conv_proj", "patches"),
        (r"^encoder\.layers\.encoder_layer_", "blocks."), (r"^encoder\.ln", "norm"), (r"^heads\.", ""),
        (r"ln_([12])", r"norm\1"), (r"self_attention\.in_proj_", "qkv."), (r"self_attention\.out_proj", "out"),
        (r"mlp\.linear_1", "mlp.0"), (r"mlp\.linear_2", "mlp.3"),
    )  # fmt: skip


LAYOUTS: tuple[Layout, ...] = (Bert(), Timm(), Torchvision())


def resampled(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Position vectors (1, 1 + patches, width), the class token's first, for another grid of patches (rows, columns).

    Bicubic with a low-pass filter, as timm does. The file's grid is square; the class token keeps its vector.
    """
    side = math.isqrt(positions.shape[1] - 1)
    if (side, side) == grid:
        return positions
    token, old = positions[:, :1].float(), positions[:, 1:].float()
    image = old.unflatten(1, (side, side)).permute(0, 3, 1, 2)
    image = F.interpolate(image, grid, mode="bicubic", antialias=True)
    return torch.cat([token, image.flatten(2).mT], dim=1)
