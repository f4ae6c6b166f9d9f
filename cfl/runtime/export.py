"""Files of a network for use without `cfl`: safetensors and ONNX."""

import copy
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from cfl.core import ConfigError, Tree, files, machine, packages, unknown


def write(path: Path, network: nn.Module, leaves: Tree, about: Mapping[str, Any]) -> Path:
    """Write a network to `path` in the format of its suffix, atomically, and return the path.

    leaves: its parameters and buffers by name; about: JSON data, with the "input_shape" of a sample; a safetensors file
    holds them as metadata. Raises ConfigError for an unknown suffix, a missing package, or a file that cannot be
    written.
    """
    if path.suffix not in _ENCODE:
        raise unknown("suffix of an exported file", path.suffix, _ENCODE)
    content = _ENCODE[path.suffix](network, leaves, about)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, content, path.with_name(f".{path.name}.tmp"))
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written ({error.strerror}); choose another file") from None
    return path


def _safetensors(network: nn.Module, leaves: Tree, about: Mapping[str, Any]) -> bytes:
    stored = network.state_dict()  # without the buffers that have persistent=False
    every = {name: leaf for name, leaf in _under_every_name(network, leaves).items() if name in stored}
    own = {name: leaf.detach().cpu().contiguous().clone() for name, leaf in every.items()}
    return save(own, {"cfl": json.dumps(about)})


def _onnx(network: nn.Module, leaves: Tree, about: Mapping[str, Any]) -> bytes:
    packages.need("onnx", "an .onnx file")
    sample = torch.zeros(2, *about["input_shape"])
    batch = {0: torch.export.Dim("batch")}
    try:
        # torch lists torchvision's operators, which a network may not need
        with machine.log_level("torch.onnx", logging.ERROR), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(
                _holding(network, leaves), (sample,), input_names=["x"], output_names=["logits"],
                dynamic_shapes=(batch,), dynamo=True, verbose=False,
            )  # fmt: skip
    except Exception as error:  # whatever torch raises for a network that it cannot trace
        raise ConfigError(f"torch cannot export this network to ONNX: {error}; export to .safetensors") from error
    assert program is not None
    if not program.model_proto.graph.input[0].type.tensor_type.shape.dim[0].dim_param:
        raise ConfigError(
            "the network's forward fixes the number of samples, so an .onnx file would take batches of "
            f"{len(sample)} alone; write x.shape[0] for len(x) there, or export to .safetensors"
        )
    return program.model_proto.SerializeToString()


def _holding(network: nn.Module, leaves: Tree) -> nn.Module:
    """A copy of the network in evaluation mode with these parameters and buffers; a grown head may be wider."""
    network = copy.deepcopy(network).eval()
    for name, leaf in _under_every_name(network, leaves).items():
        path, _, own = name.rpartition(".")
        layer = network.get_submodule(path)
        if own in layer._parameters:
            setattr(layer, own, nn.Parameter(leaf.detach().clone(), requires_grad=False))
        else:
            setattr(layer, own, leaf.detach().clone())
    return network


def _under_every_name(network: nn.Module, leaves: Tree) -> Tree:
    """The leaves, those that a network shares under each of their names; `leaves` have the first one."""
    own = (network.named_parameters, network.named_buffers)
    pairs = [pair for named in own for pair in named(remove_duplicate=False)]
    first = {id(leaf): name for name, leaf in reversed(pairs)}
    return {name: leaves[first[id(leaf)]] for name, leaf in pairs if first[id(leaf)] in leaves}


_ENCODE = {".safetensors": _safetensors, ".onnx": _onnx}
