"""What every hook has to return: a table, with a check for each hook."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from cfl.contract.client import MEMORY
from cfl.contract.context import Ctx
from cfl.contract.kinds import kind, tree_fault, unlike_fault
from cfl.contract.regularizer import LocalRegularizer
from cfl.contract.rounds import Phase, RoundInfo, Server
from cfl.contract.samples import Batch
from cfl.contract.strategy import Strategy
from cfl.core import Tree, unknown
from cfl.models import Model

FIGURES = frozenset(
    (
        *("method", "benchmark", "seed", "acc", "fgt", "fgt_max", "bwt", "learning_accuracy", "accuracy_matrix"),
        *("by_task", "bytes_up", "bytes_down", "bytes_by_phase", "seconds", "local_accuracy", "client_bytes"),
        *("client_bytes_max", "epsilon", "epsilon_by_client", "delta", "epsilon_of", "noise_multiplier"),
        *("task_accuracy", "validation_acc", "validation_matrix", "stopped", "callbacks", "epsilon_without_skipped"),
        *("wire_bytes_up", "wire_bytes_down", "fwt", "initial_accuracy"),
    )
)
"""Figures of metrics.json that a run computes itself."""


class Promise(NamedTuple):
    """What a hook has to return. fault(result, member, *arguments): describes a wrong result; empty for a right one."""

    text: str
    fault: Callable[..., str]


def _gradient(value: Any, _: Any, like: Tree, *__: Any) -> str:
    return unlike_fault(value, like, like)


def _trees(value: Any) -> str:
    if not isinstance(value, dict):
        return kind(value)
    faults = ((owner, tree_fault(leaves)) for owner, leaves in value.items())
    return next((f"trees with '{owner}' as {text}" for owner, text in faults if text), "")


def _with_params(value: Any, like: Tree, needed: Iterable[str]) -> str:
    if text := _trees(value) or ("" if "params" in value else "trees without 'params'"):
        return text
    return unlike_fault(value["params"], like, needed, "trees with 'params' as a tree", types=True)


def _first(value: Any, _: Any, params: Tree, *__: Any) -> str:
    return _trees(value) or (_with_params(value, params, params) if "params" in value else "")


def _next(value: Any, _: Any, server: Server, *__: Any) -> str:
    return _with_params(value, server["params"], server["params"]) if "params" in server else _trees(value)


def _broadcast(value: Any, _: Any, server: Server, info: RoundInfo) -> str:
    return _with_params(value, server["params"], [name for name in info.names if name in server["params"]])


def _served(value: Any, _: Any, server: Server, task: int) -> str:
    own = [name for name in server["params"] if name.partition("@")[2] in ("", str(task))]  # without others' heads
    return unlike_fault(value, server["params"], own)


def _inferred(value: Any, _: Any, server: Server, x: Tensor, task: int, __: Model) -> str:
    if value is None:
        return ""
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.shape != x.shape[:1]:
        return kind(value)
    wrong = value[(value < 0) | (value > task)]
    return f"the task {int(wrong[0])}, where tasks are 0 to {task}" if len(wrong) else ""


def _state(value: Any, member: LocalRegularizer, *_: Any) -> str:
    """Check a client's state. A strategy's leaf `MEMORY` has to hold places."""
    if (text := tree_fault(value)) or not isinstance(member, Strategy) or MEMORY not in value:
        return text
    places = value[MEMORY]
    right = places.dtype == torch.int64 and places.dim() == 2 and places.shape[1] == 2
    return "" if right else f"a tree whose leaf '{MEMORY}' is {kind(places)} instead of an int64 tensor of shape (m, 2)"


def _pair(value: Any, first: Callable[[Any], str], second: Callable[[Any], str]) -> str:
    if not isinstance(value, tuple) or len(value) != 2:
        return kind(value)
    return next((f"a pair with {text}" for text in (first(value[0]), second(value[1])) if text), "")


def _sent(value: Any, stacked: bool, counters: Callable[[], Sequence[str]]) -> str:
    """Check an upload. counters: names of the model's buffers, whose integers no sum includes."""
    text = tree_fault(value)
    whole = [] if text or stacked else [name for name, leaf in value.items() if not leaf.is_floating_point()]
    if whole and (wrong := [name for name in whole if name not in counters()]):
        text = f"an upload whose leaf '{wrong[0]}' is {kind(value[wrong[0]])}, where sums take floating-point numbers"
    return text


def _finished(value: Any, member: LocalRegularizer, _: Tree, ctx: Ctx, *__: Any) -> str:
    stacked = member.gathers == "stack" and not isinstance(member, Strategy)  # a strategy's updates are averaged
    upload = partial(_sent, stacked=stacked, counters=lambda: ctx.model.buffers(ctx.task))
    return _pair(value, upload, partial(_state, member=member))


def _worked(value: Any, member: LocalRegularizer, _: Tree, *others: Any) -> str:
    info: RoundInfo = others[-1]
    upload = partial(_sent, stacked=member.gathers == "stack", counters=lambda: info.model.buffers(info.task))
    return _pair(value, upload, partial(_state, member=member))


def _stepped(value: Any, _: Any, step: Tree, own: Tree, gathered: Tree, params: Tree, info: RoundInfo) -> str:
    needed = [name for name in step if name in params]
    return _pair(value, lambda found: unlike_fault(found, {**step, **params}, needed), tree_fault)


def _combined(value: Any, _: Any, updates: Tree, *__: Any) -> str:
    like = {name: leaf[0] for name, leaf in updates.items()}
    return unlike_fault(value, like, like, types=True)


def _like_uploads(value: Any, _: Any, uploads: Tree, *__: Any) -> str:
    return unlike_fault(value, uploads, uploads, types=True)


def _sizes(value: Any, _: Any, uploads: Tree, *__: Any) -> str:
    like = {name: leaf.new_zeros(len(leaf), dtype=torch.float64) for name, leaf in uploads.items()}
    return unlike_fault(value, like, like, types=True)


def _batch(value: Any, *_: Any) -> str:
    if not isinstance(value, Batch):
        return kind(value)
    for name, leaf in value._asdict().items():
        if name == "task" and leaf is None:
            continue
        if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != len(value.x):
            return f"a Batch whose {name} is {kind(leaf)}"
        if name in ("y", "task") and leaf.dtype != torch.int64:
            return f"a Batch whose {name} is {kind(leaf)} instead of int64"
    return ""


def _loss(value: Any, *_: Any) -> str:
    return "" if isinstance(value, Tensor) and not value.dim() and value.is_floating_point() else kind(value)


def _term(value: Any, *_: Any) -> str:
    return "" if isinstance(value, Real) or (isinstance(value, Tensor) and not value.dim()) else kind(value)


def _tasks(value: Any, _: Any, task: int, tasks: int) -> str:
    if not isinstance(value, tuple | list):
        return kind(value)
    wrong = [one for one in value if not isinstance(one, int | np.integer) or not 0 <= one < tasks]
    return f"the task {wrong[0]!r}, where tasks are 0 to {tasks - 1}" if wrong else ""


def _some_tasks(value: Any, member: LocalRegularizer, task: int, tasks: int) -> str:
    if (text := _tasks(value, member, task, tasks)) or value:
        return text or ("a task twice" if len(set(value)) < len(value) else "")
    return kind(value)


def _frozen(value: Any, _: Any, task: int, model: Model) -> str:
    if not isinstance(value, frozenset | set):
        return kind(value)
    wrong = [name for name in value if not isinstance(name, str) or name not in model.params]
    return f"the {unknown('parameter', str(min(wrong, key=str)), model.params)}" if wrong else ""


def _paused(value: Any, member: LocalRegularizer, info: RoundInfo) -> str:
    return _frozen(value, member, info.task, info.model)


def _listed(value: Any, *_: Any, of: type) -> str:
    if not isinstance(value, list | tuple):
        return kind(value)
    return next((f"a list with {kind(item)}" for item in value if not isinstance(item, of)), "")


def _figures(value: Any, *_: Any) -> str:
    if not isinstance(value, dict):
        return kind(value)
    if taken := [name for name in value if name in FIGURES]:
        return f"a figure '{taken[0]}', which every run has of its own"
    return next(_not_json(value, ""), "")


def _pictures(value: Any, *_: Any) -> str:
    if value is None:
        return ""
    right = isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 5 and value.shape[2] in (1, 3)
    return "" if right and value.numel() else kind(value)


def _not_json(value: Any, path: str) -> Iterator[str]:
    """Yield the parts of nested values that JSON cannot hold."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _not_json(item, f"{path}[{name!r}]" if path else str(name))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _not_json(item, f"{path}[{number}]")
    elif hasattr(value, "tolist"):
        yield from _not_json(value.tolist(), path)
    elif value is not None and not isinstance(value, str | int | float):
        yield f"'{path}' as {kind(value)}"


def _reason(value: Any, *_: Any) -> str:
    return "" if value is None or isinstance(value, str) else kind(value)


def _function(value: Any, *_: Any) -> str:
    return "" if callable(value) else kind(value)


_STATE = "a tree, that is a dictionary from names to tensors"
_GRADIENT = "a tree with the names and shapes of the parameters that train"
_UPLOAD = "a pair: the upload, a tree of floating-point tensors, and the client's new state, a tree"
_SERVER = "the server's trees, with all parameters and buffers in 'params'"

PROMISES = {
    "refuses": Promise("a text, or None", _reason),
    "plan": Promise("a list of cfl.Phase", partial(_listed, of=Phase)),
    "sees": Promise("a tuple of at least one task", _some_tasks),
    "init_server": Promise("a dictionary from names to trees", _first),
    "notes": Promise("a list of texts", partial(_listed, of=str)),
    "heads": Promise("a tuple of tasks", _tasks),
    "frozen": Promise("a frozenset of names of parameters", _frozen),
    "paused": Promise("a frozenset of names of parameters", _paused),
    "broadcast": Promise("a dictionary from names to trees, with the round's parameters in 'params'", _broadcast),
    "init_shared": Promise(_STATE, tree_fault),
    "provide": Promise(_STATE, tree_fault),
    "init_client": Promise(_STATE, _state),
    "augment": Promise("a Batch of tensors of one length, with int64 labels", _batch),
    "around": Promise("a function of (params, ctx)", _function),
    "around gradient": Promise(f"a function whose result is {_GRADIENT}", _gradient),
    "loss": Promise("a floating-point tensor of shape ()", _loss),
    "penalty": Promise("a tensor of shape (), or a number", _term),
    "adjust": Promise(_GRADIENT, _gradient),
    "finish": Promise(_UPLOAD, _finished),
    "send": Promise(_STATE, tree_fault),
    "work": Promise(_UPLOAD, _worked),
    "sizes": Promise("a tree with the names of the uploads, of float64 tensors of shape (clients,)", _sizes),
    "poisoned": Promise("a tree with the names, shapes and types of the upload", _like_uploads),
    "cap": Promise("a tree with the names, shapes and types of the uploads", _like_uploads),
    "aggregate": Promise("a tree with the names and types of the updates, without the dimension of clients", _combined),
    "server_step": Promise(
        "a pair: the server's step, a tree with the shapes of the parameters, and its new tree", _stepped
    ),
    "absorb": Promise(_SERVER, _next),
    "serve": Promise("a tree with the names and shapes of the server's 'params'", _served),
    "infer_task": Promise("None, or an int64 tensor with a task for each sample", _inferred),
    "report": Promise("a dictionary of new names to numbers, texts, lists or dictionaries of them", _figures),
    "images": Promise("None, or a uint8 tensor (rows, columns, 1 or 3 channels, height, width)", _pictures),
    "begin_task": Promise(_SERVER, _next),
}
"""What each hook has to return. "around gradient" is the function that `around` returns."""
