"""Weights that were trained elsewhere, from a local folder with `model.safetensors` and, for a BERT, `config.json`.

Pickles are not read, since they can run code. See `layouts` for the names that a file's tensors may have.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from cfl.core import ConfigError, Tree
from cfl.core.errors import FEW_NAMES, few, reason
from cfl.models.layouts import LAYOUTS, Layout

FILE, CONFIG = "model.safetensors", "config.json"


def network(folder: str) -> str:
    """Name of the network that takes the weights in a folder. Raises ConfigError if none does."""
    return _layout(folder).model


def sizes(folder: str, model: str) -> dict[str, Any]:
    """Options of the builder of network `model` for the weights in a folder.

    Raises ConfigError for the weights of another network, or of one that the builder cannot make.
    """
    layout = _layout(folder)
    if layout.model != model:
        raise ConfigError(f"model.weights: '{folder}' has weights of {layout.model}; set model.name={layout.model}")
    shapes = {layout.renamed(name): shape for name, shape in _shapes(folder).items()}
    try:
        return layout.sizes(shapes, _config(folder))
    except ConfigError as error:
        raise ConfigError(f"model.weights: in '{folder}', {error}") from None


def tensors(folder: str, options: Mapping[str, Any], input_shape: Sequence[int], wanted: Mapping[str, Any]) -> Tree:
    """The tensors in a folder by their names in the network.

    options: of the network's builder; input_shape: of its inputs; wanted: its parameters without those of the head,
    each of the shape that it has there. Heads in the file are left out. Raises ConfigError for tensors that are
    missing, that have another shape, or that the network does not know.
    """
    layout, path = _layout(folder), Path(folder) / FILE
    found = {layout.renamed(name): leaf for name, leaf in load_file(path).items()}
    found = {name: leaf for name, leaf in found.items() if name in wanted or not name.startswith(layout.left_out)}
    faults = {
        "it lacks": [name for name in wanted if name not in found],
        "the network does not have": [name for name in found if name not in wanted],
    }
    for fault, names in faults.items():
        if names:
            raise ConfigError(f"model.weights: '{path}' does not fit: {fault} {few(names, FEW_NAMES)}")
    try:
        found = layout.fitted(found, options, input_shape)
    except ConfigError as error:
        raise ConfigError(f"model.weights: '{path}' does not fit: {error}") from None
    for name, leaf in found.items():
        if leaf.shape != wanted[name].shape:
            raise ConfigError(
                f"model.weights: '{path}' does not fit: '{name}' has shape {tuple(leaf.shape)} there, and "
                f"{tuple(wanted[name].shape)} in the network; leave the model's sizes to the folder"
            )
    return found


def _layout(folder: str) -> Layout:
    names = _shapes(folder)
    for layout in LAYOUTS:
        if any(name.endswith(layout.mark) for name in names):
            return layout
    marks = ", ".join(f"{layout.mark} ({layout.model})" for layout in LAYOUTS)
    raise ConfigError(
        f"model.weights: '{Path(folder) / FILE}' has none of the tensors {marks}; it is of another network"
    )


def _shapes(folder: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the header of a folder's file. Raises ConfigError if there is no readable one."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise ConfigError(
            f"model.weights: there is no file '{path}'; write one with safetensors.torch.save_file, since pickled "
            "weights are not read"
        )
    try:
        with safe_open(path, "pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"model.weights: '{path}' cannot be read: {reason(error)}") from error


def _config(folder: str) -> dict[str, Any]:
    """Content of config.json, empty if there is none."""
    path = Path(folder) / CONFIG
    try:
        found = json.loads(path.read_text()) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.weights: '{path}' cannot be read: {reason(error)}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"model.weights: '{path}' must hold a JSON object")
    return found
