"""The network of a run, and the handle on it."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cfl import models
from cfl.config.schema import RunConfig
from cfl.core import ConfigError, rng
from cfl.models import Model, adapters


def build(config: RunConfig, input_shape: Sequence[int], outputs: int, vocabulary: int | None) -> nn.Module:
    """Build the configured network with initial weights drawn by the seed. vocabulary: of the stream.

    Raises ConfigError for a network that takes no texts, or has too few token ids, in a stream of texts.
    """
    complete = options(config, vocabulary)
    with rng.fork(rng.key(config.seed, "model")):
        return models.build(config.model.name, input_shape, outputs, complete)


def options(config: RunConfig, vocabulary: int | None) -> Mapping[str, Any]:
    """The network's options, completed by the number of token ids of the stream, unless they have a larger one.

    Raises ConfigError as `build` does.
    """
    name, options = config.model.name, config.model.options
    if vocabulary is None:
        return options
    if "vocabulary" not in options:
        raise ConfigError(
            f"model '{name}' takes no texts, and the stream has token ids; set model.name to a network of texts"
        )
    own = options["vocabulary"]
    if own is not None and own < vocabulary:
        raise ConfigError(
            f"model.vocabulary is {own}, and the stream's tokenizer has {vocabulary} token ids; raise it, or set it to "
            "null for the number of the tokenizer"
        )
    return {**options, "vocabulary": vocabulary if own is None else own}


def handle(
    config: RunConfig,
    network: nn.Module,
    input_shape: Sequence[int],
    heads: Sequence[int],
    scenario: str,
    device: torch.device | str,
) -> Model:
    """Return the handle on a network, with the configured adapters. heads, scenario: of the stream."""
    if (own := config.model).adapter == "lora":
        options = adapters.Lora(own.adapter_rank, own.adapter_alpha, own.adapter_targets)
        network = adapters.adapted(network, input_shape, options, seed=config.seed, device=device, dtype=torch.float32)
    return Model(
        network,
        input_shape,
        heads,
        multi_head=scenario != "domain",
        growing=scenario == "class",
        norm_stats=config.model.norm_stats,
        seed=config.seed,
        device=device,
        dtype=torch.float32,
        precision=config.precision,
    )
