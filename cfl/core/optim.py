"""Local optimisers over trees: (init, update) pairs, equal to `torch.optim` to the bit.

Only the names in the tree are touched: parameters of unused heads get neither weight decay nor momentum.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch.optim.sgd import sgd as torch_sgd

from cfl.core import tree
from cfl.core.tree import Tree


class Optimizer(NamedTuple):
    """init(params) -> state; update(grads, state, params, lr, step), which writes to params and state; step from 0.

    All is element by element, so leaves may have a further first dimension for the clients of a block.
    momentum: the heavy-ball factor, 0 where there is none.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree, float, int], None]
    momentum: float = 0.0


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """SGD with heavy-ball momentum and coupled weight decay, as torch.optim.SGD."""

    def init(params: Tree) -> Tree:
        return tree.map(torch.zeros_like, params) if momentum else {}

    def update(grads: Tree, state: Tree, params: Tree, lr: float, step: int) -> None:
        leaves = [params[name] for name in grads]
        torch_sgd(
            leaves,
            list(grads.values()),
            [state[name] if momentum else None for name in grads],
            # one pass over memory; with momentum it rounds the last elements of a leaf otherwise than the first, and
            # `torch.func`, under which methods are checked, does not know it
            fused=not momentum and peek_interpreter_stack() is None and all(map(_fusible, leaves, grads.values())),
            foreach=False,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )

    return Optimizer(init, update, momentum)


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0) -> Optimizer:
    """Adam (Kingma and Ba, 2015) with coupled weight decay, as torch.optim.Adam."""

    def init(params: Tree) -> Tree:
        first = {f"mean/{name}": torch.zeros_like(param) for name, param in params.items()}
        return first | {f"square/{name}": torch.zeros_like(param) for name, param in params.items()}

    def update(grads: Tree, state: Tree, params: Tree, lr: float, step: int) -> None:
        step_size = lr / (1 - beta1 ** (step + 1))
        correction = (1 - beta2 ** (step + 1)) ** 0.5
        for name, grad in _decayed(grads, params, weight_decay).items():
            mean = state[f"mean/{name}"].lerp_(grad, 1 - beta1)
            square = state[f"square/{name}"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            params[name].addcdiv_(mean, square.sqrt().div_(correction).add_(eps), value=-step_size)

    return Optimizer(init, update)


def _fusible(leaf: Tensor, grad: Tensor) -> bool:
    """What torch's fused kernel takes for granted of the two, and where it gives the same bits as one after another."""
    alike = leaf.shape == grad.shape and leaf.dtype == grad.dtype and leaf.is_contiguous() and grad.is_contiguous()
    return alike and leaf.device.type == grad.device.type == "cpu" and leaf.dtype in (torch.float32, torch.float64)


def _decayed(grads: Tree, params: Tree, weight_decay: float) -> Tree:
    if not weight_decay:
        return grads
    return tree.map(lambda grad, param: torch.add(grad, param, alpha=weight_decay), grads, params)


def build(name: Literal["sgd", "adam"], momentum: float, weight_decay: float) -> Optimizer:
    """The optimiser of that name; Adam has no momentum to set."""
    return adam(weight_decay=weight_decay) if name == "adam" else sgd(momentum, weight_decay)
