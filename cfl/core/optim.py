"""Local optimisers over trees: (init, update) pairs, equal to `torch.optim` to the bit.

An update touches only the names in the gradients: unused heads get neither weight decay nor momentum.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.optim.adam import adam as torch_adam
from torch.optim.sgd import sgd as torch_sgd

from cfl.core import tree
from cfl.core.functorch import transforming
from cfl.core.tree import Tree

_FUSED = (torch.float32, torch.float64)


class Optimizer(NamedTuple):
    """init(params) -> state; update(grads, state, params, lr, step) writes to params and state; step counts from 0.

    Updates are elementwise, so leaves may have an extra first dimension for the clients of a block.
    momentum: heavy-ball factor, 0 without momentum.
    fuses(grads, params): whether the update is one kernel that is the same at every step, so that it can be part of a
    trace; lr may then be a tensor () float64.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree, float | Tensor, int], None]
    momentum: float = 0.0
    fuses: Callable[[Tree, Tree], bool] = lambda grads, params: False


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """SGD with heavy-ball momentum and coupled weight decay, as torch.optim.SGD."""

    def init(params: Tree) -> Tree:
        return tree.map(torch.zeros_like, params) if momentum else {}

    def fuses(grads: Tree, params: Tree) -> bool:
        # One pass over memory. With momentum, the fused kernel rounds the last elements of a leaf differently, and
        # `torch.func` does not support it.
        alike = len({grad.dtype for grad in grads.values()}) == 1
        return not momentum and alike and not transforming() and all(_fusible(params[n], grads[n]) for n in grads)

    def update(grads: Tree, state: Tree, params: Tree, lr: float | Tensor, step: int) -> None:
        options: dict[str, Any] = {"weight_decay": weight_decay, "momentum": momentum, "dampening": 0.0}
        options |= {"lr": lr, "nesterov": False, "maximize": False}
        if fuses(grads, params):  # the kernel itself, since `torch_sgd` would first group the leaves at every step
            pairs = [_in_memory_order(params[name], grad) for name, grad in grads.items()]
            leaves, steps = zip(*pairs, strict=True)
            torch._fused_sgd_(leaves, steps, [], **options, is_first_step=False)
            return
        momenta = [state[name] if momentum else None for name in grads]
        torch_sgd([params[name] for name in grads], [*grads.values()], momenta, foreach=False, **options)

    return Optimizer(init, update, momentum, fuses)


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0) -> Optimizer:
    """Adam (Kingma and Ba, 2015) with coupled weight decay, as torch.optim.Adam."""

    def init(params: Tree) -> Tree:
        first = {f"mean/{name}": torch.zeros_like(param) for name, param in params.items()}
        return first | {f"square/{name}": torch.zeros_like(param) for name, param in params.items()}

    def update(grads: Tree, state: Tree, params: Tree, lr: float | Tensor, step: int) -> None:
        torch_adam(
            [params[name] for name in grads],
            list(grads.values()),
            [state[f"mean/{name}"] for name in grads],
            [state[f"square/{name}"] for name in grads],
            [],
            [torch.tensor(float(step)) for _ in grads],
            foreach=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )

    return Optimizer(init, update)


def same_layout(leaf: Tensor, grad: Tensor) -> bool:
    """Whether two tensors of one shape have their numbers in the same order, without gaps, in memory."""
    order = _order(leaf)
    return leaf.shape == grad.shape and all(each.permute(order).is_contiguous() for each in (leaf, grad))


def _order(leaf: Tensor) -> list[int]:
    """Dimensions by descending stride: permuted to this order, a tensor without gaps is contiguous."""
    strides = leaf.stride()
    places = range(leaf.dim())
    return [*places] if leaf.is_contiguous() else sorted(places, key=lambda place: -strides[place])


def _fusible(leaf: Tensor, grad: Tensor) -> bool:
    """Whether torch's fused kernel accepts the two tensors and gives the same bits as the loop."""
    supported = leaf.is_cpu and grad.is_cpu and leaf.dtype == grad.dtype and leaf.dtype in _FUSED
    dense = leaf.is_contiguous() or leaf.permute(_order(leaf)).is_contiguous()
    return supported and dense and leaf.shape == grad.shape


def _in_memory_order(leaf: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """A view of the leaf with its dimensions in the order of memory, and the gradient in the same order, contiguous."""
    if leaf.is_contiguous():
        return leaf, grad.contiguous()
    order = _order(leaf)
    return leaf.permute(order), grad.permute(order).contiguous()


def build(name: Literal["sgd", "adam"], momentum: float, weight_decay: float) -> Optimizer:
    """Make the optimiser of that name; `momentum` has no effect on Adam."""
    return adam(weight_decay=weight_decay) if name == "adam" else sgd(momentum, weight_decay)
