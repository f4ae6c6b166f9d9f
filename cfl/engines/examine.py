"""Find out why an update is not finite: a client is trained again, with hooks that look at their results."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from cfl.contract import Ctx, GradFn, LocalRegularizer, Strategy
from cfl.contract.checked import with_hooks
from cfl.contract.composed import ComposedMethod, prefix
from cfl.contract.finite import fault
from cfl.core.functorch import transforming

_HOOKS = ("augment", "around", "loss", "penalty", "adjust", "finish", "send", "work")


class NotFinite(Exception):
    """The first result of a hook that is not finite, with its local step. early: whether this is the first step."""

    early = False


class Watched(ComposedMethod):
    """A method whose client hooks raise `NotFinite` for a result that is not finite."""

    def __init__(self, composed: ComposedMethod) -> None:
        super().__init__({owner: _watched(owner, member) for owner, member in composed.members.items()})

    def around(self, grad_fn: GradFn) -> GradFn:
        return super().around(_looking(grad_fn, "", "the gradient of the loss"))


def _watched(owner: str, member: LocalRegularizer) -> LocalRegularizer:
    """A copy of the member whose own hooks look at their results."""
    base, name = type(member), f"{prefix(owner)} ({type(member).__name__})"
    kind = Strategy if isinstance(member, Strategy) else LocalRegularizer
    own = [hook for hook in _HOOKS if hook == "loss" or getattr(base, hook, None) is not getattr(kind, hook, None)]
    hooks = {hook: _looking(getattr(base, hook), hook, f"{hook} of {name}") for hook in own if hasattr(base, hook)}
    return with_hooks(member, hooks)


def _looking(call: Callable[..., Any], hook: str, what: str) -> Callable[..., Any]:
    """The hook, or a gradient function, with a look at its result. what: its name in messages."""

    def looking(*args: Any) -> Any:
        result = call(*args)
        if hook == "around":
            return _looking(result, "", what)
        _look(result[0] if hook in ("finish", "work") else result, what, args)
        if hook in ("loss", "penalty") and isinstance(result, Tensor) and result.requires_grad and not transforming():
            by = [leaf for leaf in _tensors(args[1]) if leaf.requires_grad]  # args[0] is the method itself
            grads = torch.autograd.grad(result, by, retain_graph=True, allow_unused=True)
            _look(grads, f"the gradient of {what}", args)
        return result

    return looking


def _look(result: Any, what: str, args: tuple[Any, ...]) -> None:
    """Raise NotFinite for the first tensor in a result that is not finite. Under transforms, tensors have no values."""
    if transforming():
        return
    for leaf in _tensors(result):
        if leaf.is_floating_point() and not leaf.isfinite().all():
            steps = [each.step for each in args if isinstance(each, Ctx)]
            error = NotFinite(f"{what} is {fault(leaf)}" + "".join(f" at local step {step}" for step in steps))
            error.early = steps == [0]
            raise error


def _tensors(result: Any) -> Iterator[Tensor]:
    """All tensors of a hook's result, and its numbers as tensors."""
    if isinstance(result, Tensor | float):
        yield torch.as_tensor(result)
    elif isinstance(result, Mapping | tuple | list):
        for each in result.values() if isinstance(result, Mapping) else result:
            yield from _tensors(each)
