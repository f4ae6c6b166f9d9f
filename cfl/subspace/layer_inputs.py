"""See what enters a model's layers, batch by batch, without storing it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from cfl.models.handle import Layer, Model
from cfl.tree import Tree
from cfl.types import Batch


@contextmanager
def watch(model: Model, layers: Sequence[Layer], see: Callable[[Layer, Tensor], None]) -> Iterator[None]:
    """Call see(layer, inputs) with inputs (batch, positions, d) whenever a forward pass reaches one of the layers."""

    def hook(layer: Layer) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        return lambda module, args, kwargs: see(layer, layer.inputs((*args, *kwargs.values())[0].detach()))

    handles = [
        model.module.get_submodule(layer.path).register_forward_pre_hook(hook(layer), with_kwargs=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def stream(
    model: Model,
    params: Tree,
    task: int,
    batches: Iterator[Batch],
    layers: Sequence[Layer],
    see: Callable[[Layer, Tensor, Batch], None],
) -> None:
    """Send batches through the model in evaluation mode and hand each layer's inputs to see(layer, inputs, batch)."""
    current: list[Batch] = []
    seen = watch(model, layers, lambda layer, inputs: see(layer, inputs, current[0]))
    with torch.no_grad(), model.evaluation(), seen:
        for batch in batches:
            current[:] = [batch]
            model.logits(params, batch.x, task)
