"""Local optimisers as pure (init, update) pairs over trees, equal to `torch.optim` to the bit.

Only the names in the tree are touched: parameters of unused heads get neither weight decay nor momentum.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch

from cfl import tree
from cfl.tree import Tree


class Optimizer(NamedTuple):
    """init(params) -> state; update(grads, state, params, lr, step) -> (new params, new state); step counts from 0.

    momentum: the heavy-ball factor, 0 where there is none.
    """

    init: Callable[[Tree], Tree]
    update: Callable[[Tree, Tree, Tree, float, int], tuple[Tree, Tree]]
    momentum: float = 0.0


def sgd(momentum: float = 0.0, weight_decay: float = 0.0) -> Optimizer:
    """SGD with heavy-ball momentum and coupled weight decay, as torch.optim.SGD."""

    def init(params: Tree) -> Tree:
        return tree.map(torch.zeros_like, params) if momentum else {}

    def update(grads: Tree, state: Tree, params: Tree, lr: float, step: int) -> tuple[Tree, Tree]:
        grads = _decayed(grads, params, weight_decay)
        if momentum:
            grads = state = tree.map(lambda buffer, grad: buffer * momentum + grad, state, grads)
        return tree.map(lambda param, grad: torch.add(param, grad, alpha=-lr), params, grads), state

    return Optimizer(init, update, momentum)


def adam(beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0) -> Optimizer:
    """Adam (Kingma and Ba, 2015) with coupled weight decay, as torch.optim.Adam."""

    def init(params: Tree) -> Tree:
        first = {f"mean/{name}": torch.zeros_like(param) for name, param in params.items()}
        return first | {f"square/{name}": torch.zeros_like(param) for name, param in params.items()}

    def update(grads: Tree, state: Tree, params: Tree, lr: float, step: int) -> tuple[Tree, Tree]:
        grads = _decayed(grads, params, weight_decay)
        step_size = lr / (1 - beta1 ** (step + 1))
        correction = (1 - beta2 ** (step + 1)) ** 0.5
        new_params: Tree = {}
        new_state: Tree = {}
        for name, grad in grads.items():
            mean = torch.lerp(state[f"mean/{name}"], grad, 1 - beta1)
            square = torch.addcmul(state[f"square/{name}"] * beta2, grad, grad, value=1 - beta2)
            new_params[name] = torch.addcdiv(params[name], mean, square.sqrt() / correction + eps, value=-step_size)
            new_state |= {f"mean/{name}": mean, f"square/{name}": square}
        return new_params, new_state

    return Optimizer(init, update)


def _decayed(grads: Tree, params: Tree, weight_decay: float) -> Tree:
    if not weight_decay:
        return grads
    return tree.map(lambda grad, param: torch.add(grad, param, alpha=weight_decay), grads, params)


def build(name: Literal["sgd", "adam"], momentum: float, weight_decay: float) -> Optimizer:
    """The optimiser of that name; Adam has no momentum to set."""
    return adam(weight_decay=weight_decay) if name == "adam" else sgd(momentum, weight_decay)
