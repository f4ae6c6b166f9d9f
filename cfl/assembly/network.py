"""The network of a run, and the handle on it."""

from collections.abc import Sequence

import torch
from torch import nn

from cfl import models
from cfl.config.schema import RunConfig
from cfl.core import rng
from cfl.models import Model, adapters


def build(config: RunConfig, input_shape: Sequence[int], outputs: int) -> nn.Module:
    """Build the configured network with initial weights drawn by the seed."""
    with rng.fork(rng.key(config.seed, "model")):
        return models.build(config.model.name, input_shape, outputs, config.model.options)


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
