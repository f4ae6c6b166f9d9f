"""Check that a module can be trained, and run it once to see which layers it calls and how many outputs it has."""

import copy
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from cfl.core import ConfigError, Tree, rng
from cfl.core.errors import MOST_NAMES, few, reason
from cfl.models.layers import NORMS, Projectable, on_input
from cfl.models.passes import draws

# A recomputation in the backward pass would read the module's own parameters, not those of the client.
_RECOMPUTES = "activation checkpointing (torch.utils.checkpoint) is not supported; call the layers without it"


class Traced(NamedTuple):
    """What a run of a module shows.

    called: projectable and normalisation layers by path, in the order of their first call; outputs: their number;
    moving: names of the buffers that a pass in training mode changes; replaced: of the buffers in whose place it puts
    another tensor, but for integers; alone: whether such a pass takes one sample;
    unreached: names of the parameters that train, but that no gradient reaches; mixed: paths of the called layers in
    whose inputs the first dimension is not that of the samples.
    """

    called: dict[str, nn.Module]
    outputs: int
    moving: list[str]
    replaced: list[str]
    alone: bool
    unreached: list[str]
    mixed: set[str]

    @property
    def projectable(self) -> list[str]:
        """Paths of the called layers that methods can project."""
        return [path for path, layer in self.called.items() if isinstance(layer, Projectable)]

    @property
    def notes(self) -> list[str]:
        """Lines on what never changes in training."""
        still, lost = few(self.unreached, MOST_NAMES), few(self.replaced, MOST_NAMES)
        why = "forward does not use them, or not as attributes of its modules, such as self.layer.weight"
        found = [f"no gradient reaches {still}: {why}"] if still else []
        return found + ([f"buffers that the forward replaces never change; write into {lost}"] if lost else [])


def own_copy(module: Any, device: torch.device | str) -> nn.Module:
    """Return a copy of a module on a device. Raises ConfigError for a module that cannot be copied or trained."""
    if not isinstance(module, nn.Module):
        given = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
        raise ConfigError(f"the model must be an nn.Module, not {given}; pass an object, such as model=MyNet()")
    try:
        for name, leaf in module.named_parameters():
            if fault := _fault(name, leaf):
                raise ConfigError(f"parameter '{name}' of the model {fault}")
        return copy.deepcopy(module).to(device)
    except ConfigError:
        raise
    except Exception as error:  # of a module without super().__init__(), or with attributes that cannot be copied
        kind = type(module).__name__
        raise ConfigError(f"the model, a {kind}, cannot be copied: {reason(error)}; see its attributes") from error


def trace(
    module: nn.Module,
    input_shape: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Traced:
    """Run a module and see what it calls and changes.

    The module runs in evaluation mode on two and on three samples of zeros, and a copy of it in training mode;
    afterwards it has its former mode, and no hook is left. dtype: of the samples; None: of the module's parameters;
    seed: of the parameters that lazy layers draw in their first pass.
    Raises ConfigError if it does not map samples of shape `input_shape` to logits (batch, outputs) that depend on its
    parameters, in both modes.
    """
    called: dict[str, nn.Module] = {}  # in the order of the first insertion
    lengths: dict[str, set[int]] = {}  # of the first dimension of each layer's inputs
    own = (leaf.dtype for leaf in module.parameters() if leaf.is_floating_point())
    x = torch.zeros(2, *input_shape, device=device, dtype=dtype or next(own, torch.float32))
    other = copy.deepcopy(module)  # running statistics change in training mode

    def see(path: str, layer: nn.Module, x: Any) -> None:
        called[path] = layer
        lengths.setdefault(path, set()).add(len(x) if isinstance(x, Tensor) and x.dim() else 0)

    hooks = [
        on_input(layer, partial(see, path, layer))
        for path, layer in module.named_modules()
        if isinstance(layer, (Projectable, *NORMS))
    ]
    was_training = module.training
    try:
        with rng.fork(rng.key(seed, "lazy"), device):
            outputs = _logits(module.eval(), x)
            mixed = {path for path, seen in lengths.items() if seen != {2}}
            lengths.clear()
            _passed(module, torch.cat([x, x[:1]]))  # a dimension of length 2 may be another one
        mixed |= {path for path in called if lengths.get(path) != {3}}
    finally:
        module.train(was_training)
        for hook in hooks:
            hook.remove()
    with rng.fork(0, device):
        given = dict(other.named_buffers())
        _logits(other.train(), x)
        _passed(other, draws(2, input_shape, device, x.dtype, module))  # zeros would not move a mean that begins at 0
        before = dict(module.named_buffers())
        after = {name: leaf for name, leaf in other.named_buffers() if name in before}
        moving = [name for name, leaf in after.items() if not torch.equal(leaf, before[name])]
        replaced = [name for name, leaf in after.items() if leaf is not given[name] and leaf.is_floating_point()]
        _check_gradient(other, x)
        alone = _passed(other, x[:1])
        if alone is not None and alone.shape != outputs[:1].shape:
            raise ConfigError(
                f"the model's forward returns a tensor of shape {tuple(alone.shape)} for a single sample; it has to be "
                f"{tuple(outputs[:1].shape)}, so keep the first dimension, as flatten(1) does and squeeze() does not"
            )
        return Traced(called, outputs.shape[1], moving, replaced, alone is not None, _unreached(other, x), mixed)


def features_fault(classifier: str | None, mixed: Collection[str]) -> str:
    """What to change so that each sample has its own inputs to the last Linear layer; empty if it has.

    mixed: as in `Traced`.
    """
    if classifier is None:
        return "end the model in nn.Linear"
    if classifier in mixed:
        return f"let the inputs of that layer, '{classifier}', have the samples as their first dimension"
    return ""


def constants(module: nn.Module, moving: Collection[str]) -> Tree:
    """Return the buffers of a module that no client sends: masks, which have no mean over clients.

    These are the buffers of truth values, or with infinities, that a pass in training mode does not change. moving:
    names of those that it changes.
    """
    fixed = {name: leaf for name, leaf in module.named_buffers() if name not in moving}
    return {name: leaf for name, leaf in fixed.items() if leaf.dtype == torch.bool or not leaf.isfinite().all()}


def frozen_names(module: nn.Module) -> list[str]:
    """Names of the parameters with requires_grad=False. Raises ConfigError if there are no others."""
    fixed = [name for name, leaf in module.named_parameters() if not leaf.requires_grad]
    if fixed and len(fixed) == len([*module.parameters()]):
        raise ConfigError(
            "all parameters of the model have requires_grad=False, so nothing trains; "
            "call requires_grad_(True) on the layers that should"
        )
    return fixed


def _passed(module: nn.Module, x: Tensor) -> Tensor | None:
    try:
        with torch.no_grad():
            found: Tensor = module(x)
    except Exception:  # such as batch normalisation, for which one sample has no variance
        return None
    return found


def _unreached(module: nn.Module, x: Tensor) -> list[str]:
    """Return the names of the parameters that train, but that the gradient does not reach if a step replaces them."""
    leaves = {name: leaf.detach().clone() for name, leaf in module.named_parameters()}
    trained = {name: leaves[name].requires_grad_() for name, leaf in module.named_parameters() if leaf.requires_grad}
    try:
        with torch.enable_grad():
            outputs = torch.func.functional_call(module, leaves, (x,))
            found = torch.autograd.grad(outputs.sum(), [*trained.values()], allow_unused=True)
    except Exception:  # no gradient reaches any, as with frozen ones alone, or the module cannot be called like this
        return []
    return [name for name, grad in zip(trained, found, strict=True) if grad is None]


def _check_gradient(module: nn.Module, x: Tensor) -> None:
    """Raise ConfigError if the gradient of the outputs for a batch cannot be computed."""
    leaves: list[Tensor] = [leaf for leaf in module.parameters() if leaf.requires_grad]
    try:
        with torch.enable_grad():
            if x.is_floating_point():  # the gradient of inputs, since checkpoints that recompute do so for it
                x = x.clone().requires_grad_() + 0
                leaves.append(x)
            if leaves:
                torch.autograd.grad(module(x).sum(), leaves, allow_unused=True)
    except Exception as error:
        raise ConfigError(f"the gradient of the model cannot be computed: {reason(error)}; {_RECOMPUTES}") from error


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    """The outputs of a module for a batch, or a ConfigError if they are no logits that can be trained."""
    running: list[tuple[str, nn.Module, Any]] = []  # the modules whose forward has not returned
    hooks = []
    for path, layer in module.named_modules():
        if path and not isinstance(layer, torch.jit.ScriptModule):
            hooks += [
                layer.register_forward_pre_hook(lambda layer, given, path=path: running.append((path, layer, given))),
                layer.register_forward_hook(lambda *_: running.pop() and None),
            ]
    try:
        with torch.enable_grad(), torch.autograd.graph.disable_saved_tensors_hooks(_RECOMPUTES):
            outputs = module(x)
    except Exception as error:
        raise ConfigError(_failure(module, x, error, running)) from error
    finally:
        for hook in hooks:
            hook.remove()
    params = [*module.parameters()]
    all_frozen = bool(params) and not any(leaf.requires_grad for leaf in params)
    if not isinstance(outputs, Tensor):
        fault = f"a {type(outputs).__name__}"
    elif outputs.dim() != 2 or len(outputs) != len(x):
        fault = f"a tensor of shape {tuple(outputs.shape)}"
    elif not outputs.is_floating_point():
        fault = f"a tensor of {outputs.dtype}"
    elif module.training and not outputs.requires_grad and not all_frozen:
        raise ConfigError(
            "the outputs of the model depend on no parameter, so nothing trains; "
            "give it parameters, and leave out torch.no_grad() and detach() in its forward"
        )
    else:
        return outputs
    mode = "training" if module.training else "evaluation"
    raise ConfigError(
        f"the model's forward returns {fault} for {len(x)} samples in {mode} mode; "
        "it has to return the logits alone, a floating-point tensor of shape (batch, classes)"
    )


def _failure(module: nn.Module, x: Tensor, error: Exception, running: Sequence[tuple[str, nn.Module, Any]]) -> str:
    """Describe a failed forward: the shapes, the innermost module, and a parameter that is not float32."""
    text = f"the model does not take inputs of shape (batch, {tuple(x.shape[1:])}): {reason(error)}"
    if running:
        path, layer, given = running[-1]
        shapes = ", ".join(str(tuple(one.shape)) for one in given if isinstance(one, Tensor))
        text += f" (in layer '{path}', {type(layer).__name__}, with inputs of shape {shapes})"
    other = [(name, leaf.dtype) for name, leaf in module.named_parameters() if leaf.dtype != x.dtype]
    if other:
        name, dtype = other[0]
        text += f"; its parameter '{name}' is {dtype}, and samples are {x.dtype}: call .float() on the model"
    return text


def _fault(name: str, leaf: Tensor) -> str:
    """Why a parameter cannot be trained; empty if it can, or is that of a lazy layer that has not run."""
    if isinstance(leaf, UninitializedParameter):
        return ""
    if "@" in name:
        return "has an @ in its name, which stands before the task of a head; rename it"
    if leaf.layout != torch.strided:
        return "is sparse; replace it by its to_dense()"
    if leaf.is_complex():
        return "is complex; keep its real and its imaginary part as two parameters"
    if leaf.is_meta:
        return "is on the device 'meta', which holds no numbers; build the model on the CPU"
    return "" if leaf.isfinite().all() else "has NaN or infinity; initialise it anew"
