"""Hooks that fail, or return something else than they promise: named with class, what came, and the place."""

import copy
from functools import partial
from typing import Any

import numpy as np
import torch

import cfl
from cfl.contract import Strategy
from cfl.contract.checked import Checked
from cfl.core import ConfigError, HookError, UpdateError
from cfl.methods.regularizers import FedProx
from cfl.testing import toy_stream
from tests import toy

ONE = torch.ones(())
STRATEGY = (
    *(
        "plan",
        "sees",
        "init_server",
        "notes",
        "heads",
        "frozen",
        "paused",
        "broadcast",
        "loss",
        "work",
        "absorb",
        "serve",
    ),
    *("report", "begin_task"),
)
BOTH = ("init_client", "augment", "around", "penalty", "adjust", "finish")
REGULARIZER = (*BOTH, "init_shared", "provide", "send", "server_step")
PLACES = {  # in front of the messages on these hooks
    r"failed at clients? \d.*\(task \d, phase \w+, round 0\): ": (*BOTH[1:], "loss", "work", "send"),
    r"the server's step failed \(task 0, phase train, round 0\): ": ("absorb", "server_step"),
}


def bad(hook: str, result: Any, base: type[Any] = cfl.LocalRegularizer) -> Any:
    """A method whose hook returns a value, or what a function of the hook's arguments returns."""

    def returns(self: Any, *args: Any) -> Any:
        return result(self, *args) if callable(result) else result

    return type("Bad", (base,), {hook: returns})()


class Gathers(Strategy):
    """FedAvg with a phase of work."""

    def plan(self, task: int, tasks: int, rounds: int) -> list[cfl.Phase]:
        return [cfl.Phase("train", rounds), cfl.Phase("gather", train=False, work=True)]


def run(method: Any, *more: str, **options: Any) -> cfl.Result:
    """A run of two tasks of one round: the method alone, or as a regularizer under FedAvg."""
    given = {"strategy": method} if isinstance(method, Strategy) else {"regularizers": {"bad": method}}
    config = toy.config("tasks=2", "rounds=1", *more, method="fedavg", **options)
    return cfl.run(config, stream=toy_stream(2), **given)


def run_bad(hook: str, result: Any, *more: str, base: type[Any] | None = None) -> cfl.Result:
    return run(bad(hook, result, base or (Gathers if hook in STRATEGY else cfl.LocalRegularizer)), *more)


def row(hook: str, result: Any, came: str, *more: str, base: type[Any] | None = None, promise: str = "") -> Any:
    """A case: a hook and its result; what came and what was promised, as the message says it."""
    place = next((place for place, hooks in PLACES.items() if hook in hooks), "")
    text = rf"^(?!.*\n).*{place}Bad\.{hook} returned {came}; it has to return .*{promise}"
    return partial(run_bad, hook, result, *more, base=base), UpdateError if place else HookError, text


def gradient(change: Any) -> Any:
    """An `adjust` that changes the tree."""
    return lambda self, grads, params, ctx: change(grads)


def around(change: Any) -> Any:
    """An `around` whose function changes the tree."""
    return lambda self, grad_fn: lambda params, ctx: change(grad_fn(params, ctx))


def absorbing(change: Any) -> Any:
    """An `absorb` that changes the server's new trees."""
    return lambda self, *args: change(Strategy.absorb(self, *args))


def later(change: Any) -> Any:
    """An `adjust` that changes the tree from the second step on."""
    return lambda self, grads, params, ctx: change(grads) if ctx.step else grads


def first_halved(grads: dict[str, Any]) -> dict[str, Any]:
    return {name: leaf[:1] for name, leaf in grads.items()}


NONE = {f"hooks: {hook} returns None": row(hook, None, "None", promise=r"\w+") for hook in (*STRATEGY, *REGULARIZER)}
VMAPPED = {
    f"hooks: {hook} returns None under vmap": row(hook, None, "None", "engine=vmapped", "block=3")
    for hook in ("augment", "around", "loss", "penalty", "adjust")
}
# Another type than promised; hooks that promise a pair get one value, and the other way round.
OTHER_TYPE: dict[str, Any] = {
    "plan": ["train"],
    "sees": {0},
    "init_server": [ONE],
    "notes": "one line",
    "heads": "0",
    "frozen": ["1.weight"],
    "broadcast": ONE,
    "loss": 0.5,
    "work": {},
    "absorb": (),
    "serve": [],
    "report": [("a", 1)],
    "begin_task": "trees",
    "init_shared": 1,
    "provide": (ONE,),
    "init_client": ({}, {}),
    "augment": (ONE, ONE, ONE, ONE),
    "around": {},
    "penalty": "0.5",
    "adjust": 3.0,
    "finish": {},
    "send": ({}, {}),
    "server_step": {},
}
TYPES = {f"hooks: {hook} returns another type": row(hook, value, r"(a|an) \w+.*") for hook, value in OTHER_TYPE.items()}
FAILS = {
    f"hooks: {hook} fails": (
        partial(run_bad, hook, lambda self, *args: {}["nothing"]),
        UpdateError,
        rf"Bad\.{hook} raises KeyError: 'nothing'",
    )
    for hook in (*STRATEGY, *REGULARIZER)
}

CASES = {
    **NONE,
    **VMAPPED,
    **TYPES,
    **FAILS,
    "hooks: absorb looks for a leaf by next()": (
        partial(run_bad, "absorb", lambda self, *args: next(iter(()))),
        UpdateError,
        r"the server's step failed \(.*\): Bad\.absorb raises StopIteration \(line \d+ of hooks\.py\)$",
    ),
    # gradients
    "hooks: adjust returns no leaf": row(
        "adjust", {}, r"a tree without '1\.weight' and 5 more", promise="names and shapes"
    ),
    "hooks: adjust without a leaf": row(
        "adjust", gradient(lambda grads: dict([*grads.items()][1:])), r"a tree without '1\.weight'"
    ),
    "hooks: adjust with another name": row(
        "adjust", gradient(lambda grads: {**grads, "1.wieght": ONE}), r"a tree with the unknown name '1\.wieght'"
    ),
    "hooks: adjust with another shape": row(
        "adjust", gradient(first_halved), r"a tree whose leaf '1\.weight' is .*\(1, 8\) instead of .*\(6, 8\)"
    ),
    "hooks: adjust with numbers": row(
        "adjust",
        gradient(lambda grads: dict.fromkeys(grads, 0.5)),
        r"a tree whose leaf '1\.weight' is a float \(0\.5\)",
    ),
    "hooks: adjust with arrays": row(
        "adjust",
        gradient(lambda grads: {name: leaf.numpy() for name, leaf in grads.items()}),
        r"a tree whose leaf '1\.weight' is an? ndarray",
    ),
    "hooks: adjust with another shape under vmap": row(
        "adjust", gradient(first_halved), r"a tree whose leaf '1\.weight' is .*\(1, 8\).*", "engine=vmapped", "block=3"
    ),
    "hooks: around with another shape": row(
        "around", around(first_halved), r"a tree whose leaf '1\.weight' is .*\(1, 8\) instead of .*\(6, 8\)"
    ),
    "hooks: around without a leaf": row(
        "around", around(lambda grads: {}), r"a tree without '1\.weight' and 5 more", promise="names and shapes"
    ),
    "hooks: around whose function returns None": row("around", around(lambda grads: None), "None"),
    "hooks: penalty imports what is not there": (
        partial(run_bad, "penalty", lambda *args: __import__("nowhere")),
        UpdateError,
        "Bad.penalty raises ModuleNotFoundError: No module named 'nowhere'",
    ),
    "hooks: adjust fails later": (
        partial(run_bad, "adjust", later(lambda grads: grads["nothing"])),
        UpdateError,
        r"local training failed at client \d .*Bad\.adjust raises KeyError: 'nothing'",
    ),
    "hooks: adjust returns None later": (
        partial(run_bad, "adjust", later(lambda grads: None)),
        UpdateError,
        r"local training failed at client \d \(task 0, phase train, round 0\): ",
    ),
    "hooks: penalty of the second step is None": (
        partial(run_bad, "penalty", lambda self, params, logits, ctx: None if ctx.step else 0.0),
        UpdateError,
        r"local training failed at client \d .*Bad\.penalty returned None",
    ),
    # terms of the loss, and batches
    "hooks: loss of each sample": row(
        "loss",
        lambda self, logits, ctx: cfl.losses.cross_entropy(logits, ctx.batch),
        r"a float32 tensor of shape \(4,\)",
    ),
    "hooks: loss of shape (1,)": row("loss", lambda self, logits, ctx: logits.mean()[None], r".* of shape \(1,\)"),
    "hooks: loss in integers": row("loss", torch.tensor(1), r"an int64 tensor of shape \(\)", promise="floating-point"),
    "hooks: penalty of each sample": row(
        "penalty", lambda self, params, logits, ctx: logits.sum(dim=1), r"a float32 tensor of shape \(4,\)"
    ),
    "hooks: augment with more labels than inputs": row(
        "augment",
        lambda self, batch, ctx: batch._replace(y=torch.cat([batch.y, batch.y])),
        r"a Batch whose y is .*\(8,\)",
    ),
    "hooks: augment with labels as floats": row(
        "augment",
        lambda self, batch, ctx: batch._replace(y=batch.y.float()),
        r"a Batch whose y is a float32 tensor.*int64",
    ),
    "hooks: augment with a mask of a number": row(
        "augment", lambda self, batch, ctx: batch._replace(mask=1.0), r"a Batch whose mask is a float \(1\.0\)"
    ),
    # uploads and states
    "hooks: upload of integers": row(
        "finish",
        lambda self, params, ctx, steps: ({"n": torch.tensor(steps)}, {}),
        r"a pair with an upload whose leaf 'n' .*",
    ),
    "hooks: work uploads integers": row(
        "work", ({"labels": torch.arange(3)}, {}), "a pair with an upload whose leaf 'labels' is an int64 tensor .*"
    ),
    "hooks: upload of numbers": row(
        "finish", ({"n": 1.0}, {}), r"a pair with a tree whose leaf 'n' is a float \(1\.0\)"
    ),
    "hooks: state of numbers": row("finish", ({}, {"n": 1}), r"a pair with a tree whose leaf 'n' is an int \(1\)"),
    "hooks: three results": row("finish", ({}, {}, {}), "a tuple of 3", promise="the client's new state"),
    "hooks: first state of lists": row("init_client", {"past": []}, "a tree whose leaf 'past' is an empty list"),
    "hooks: state with a number as a name": row(
        "work", ({}, {3: ONE}), r"a pair with a tree with an int \(3\) in place of.*"
    ),
    "hooks: memory of positions alone": row(
        "work",
        ({}, {cfl.MEMORY: torch.arange(3)}),
        r".*leaf 'memory' is an int64 tensor of shape \(3,\) instead of .*\(m, 2\)",
    ),
    "hooks: memory of floats": row(
        "work", ({}, {cfl.MEMORY: torch.ones(3, 2)}), ".*leaf 'memory' is a float32 tensor .*"
    ),
    "hooks: send of lists": row("send", {"1.weight": [0.5]}, r"a tree whose leaf '1\.weight' is a list of 1"),
    # the server
    "hooks: server's trees with a number": row(
        "init_server", {"count": {"n": 0}}, r"trees with 'count' as a tree whose .*"
    ),
    "hooks: server's tree of a tensor": row(
        "init_server", {"count": ONE}, r"trees with 'count' as a float32 tensor .*"
    ),
    "hooks: other first parameters": row("init_server", {"params": {}}, r"trees with 'params' as a tree without .*"),
    "hooks: absorb without params": row(
        "absorb", absorbing(lambda new: {}), "trees without 'params'", promise="all parameters and buffers"
    ),
    "hooks: absorb with fewer params": row(
        "absorb",
        absorbing(lambda new: {"params": {}}),
        r"trees with 'params' as a tree without '1\.weight' and \d more",
    ),
    "hooks: absorb with another name": row(
        "absorb",
        absorbing(lambda new: {"params": {**new["params"], "w": ONE}}),
        "trees with 'params' as a tree with the unknown name 'w'",
    ),
    "hooks: absorb in another precision": row(
        "absorb",
        absorbing(lambda new: {"params": {name: leaf.double() for name, leaf in new["params"].items()}}),
        r".*leaf '1\.weight' is a float64 tensor .* instead of a float32 tensor .*",
    ),
    "hooks: begin_task with fewer params": row(
        "begin_task", {"params": {}}, r"trees with 'params' as a tree without '1\.weight' and \d more"
    ),
    "hooks: broadcast without a parameter": row(
        "broadcast",
        lambda self, server, info: {"params": dict([*server["params"].items()][1:])},
        r"trees with 'params' as a tree without '1\.weight'",
    ),
    "hooks: provide of numbers": row("provide", {"scale": 2.0}, r"a tree whose leaf 'scale' is a float \(2\.0\)"),
    "hooks: server_step with another shape": row(
        "server_step",
        lambda self, step, own, *more: ({name: leaf[:1] for name, leaf in step.items()}, own),
        r"a pair with a tree whose leaf '1\.weight' is .*\(1, 8\) instead of .*\(6, 8\)",
    ),
    "hooks: server_step without a leaf": row(
        "server_step", lambda self, step, own, *more: ({}, own), r"a pair with a tree without '1\.weight' and \d more"
    ),
    "hooks: serve with another shape": row(
        "serve",
        lambda self, server, task: first_halved(server["params"]),
        r"a tree whose leaf '1\.weight' is .*\(1, 8\).*",
    ),
    "hooks: serve without a leaf": row("serve", {}, r"a tree without '1\.weight' and \d more"),
    # tasks, names and phases
    "hooks: sees no task": row("sees", (), "an empty tuple", promise="at least one task"),
    "hooks: sees a task beyond the last": row("sees", (0, 2), "the task 2, where tasks are 0 to 1"),
    "hooks: sees a task below 0": row("sees", (-1,), "the task -1, where tasks are 0 to 1"),
    "hooks: sees a task twice": row("sees", (0, 0), "a task twice"),
    "hooks: sees names": row("sees", ("first",), "the task 'first', where tasks are 0 to 1"),
    "hooks: heads beyond the tasks": row("heads", (7,), "the task 7, where tasks are 0 to 1"),
    "hooks: frozen names nothing": row(
        "frozen", frozenset({"1.wieght"}), r".*'1\.wieght'; did you mean '1\.weight'\?.*"
    ),
    "hooks: paused names nothing": row(
        "paused", frozenset({"1.wieght"}), r".*'1\.wieght'; did you mean '1\.weight'\?.*"
    ),
    "hooks: notes of numbers": row("notes", [1], r"a list with an int \(1\)"),
    "hooks: plan without phases": (
        partial(run_bad, "plan", []),
        ConfigError,
        "plans no round for task 0; add a cfl.Phase",
    ),
    "hooks: plan without rounds": (
        partial(run_bad, "plan", lambda self, *args: [cfl.Phase("train", 0)]),
        ConfigError,
        "plans no round for task 0; add a cfl.Phase",
    ),
    "hooks: plan with a name twice": (
        partial(run_bad, "plan", lambda self, *args: [cfl.Phase("train"), cfl.Phase("train")]),
        ConfigError,
        r"plans phases \['train', 'train'\] for task 0; give each phase its own name",
    ),
    # figures
    "hooks: report of acc": row("report", {"acc": 1.0}, "a figure 'acc', which every run has of its own"),
    "hooks: report of seconds": row("report", {"seconds": 1.0}, "a figure 'seconds', which every run has of its own"),
    "hooks: report of a set": row("report", {"a": {"b": [1, {2}]}}, r"'a\['b'\]\[1\]' as a set"),
    "hooks: report of a complex number": row("report", {"z": 1j}, "'z' as a complex"),
    "hooks: images of floats": row("images", torch.zeros(2, 1, 1, 4, 4), "a float32 tensor .*", base=Strategy),
    "hooks: refuses True": row("refuses", True, r"a bool \(True\)", promise="a text, or None"),
    # arguments
    "hooks: too few arguments": (
        lambda: run(type("Bad", (cfl.LocalRegularizer,), {"adjust": lambda self, grads: grads})()),
        UpdateError,
        r"Bad\.adjust raises TypeError: .*takes 2 positional arguments but 4 were given",
    ),
}

WELCOME = {
    "hooks: sees as a list": lambda: run_bad("sees", lambda self, task, tasks: [task]).metrics,
    "hooks: heads as a list, of NumPy": lambda: run_bad("heads", lambda self, task, tasks: [np.int64(task)]).metrics,
    "hooks: plan as a tuple": lambda: run_bad("plan", lambda self, *args: (cfl.Phase("train"),), base=Strategy).metrics,
    "hooks: frozen as a set": lambda: run_bad("frozen", {"1.weight"}).metrics,
    "hooks: penalty as a number": lambda: run_bad("penalty", np.float64(0.5)).metrics,
    "hooks: report of tensors": lambda: (
        run_bad("report", {"own": {1: torch.ones(2)}}).metrics["own"] == {"1": [1.0, 1.0]}
    ),
    "hooks: report of NaN": lambda: run_bad("report", {"own": float("nan")}).metrics["own"] is None,
    "hooks: a stack of integers": lambda: run(Stacks()).metrics,
    "hooks: a leaf of the strategy beside the model, with a regularizer": lambda: (
        cfl.run(
            toy.config("tasks=2", "rounds=1", method="fedavg"),
            stream=toy_stream(2),
            strategy=Counts(),
            regularizers={"fedprox": FedProx(mu=0.1)},
        ).metrics
    ),
    "hooks: a checked method is copied": lambda: copy.deepcopy(Checked(FedProx(mu=0.1))).mu == 0.1,
    "hooks: a borrower of terms": lambda: run(FedProx(mu=0.1)).metrics,
}


class Counts(Strategy):
    """Uploads a number that is no parameter of the model."""

    def finish(self, params: Any, ctx: cfl.Ctx, steps: int) -> Any:
        upload, state = super().finish(params, ctx, steps)
        return {**upload, "stat/steps": torch.tensor(float(steps))}, state

    def absorb(self, server: Any, mean: Any, info: cfl.RoundInfo, lr: float) -> Any:
        step = {name: leaf for name, leaf in mean.get("strategy", {}).items() if name != "stat/steps"}
        return super().absorb(server, {**mean, "strategy": step}, info, lr)


class Stacks(cfl.LocalRegularizer):
    """Uploads an integer that the server gets from each client."""

    gathers = "stack"

    def finish(self, params: Any, ctx: cfl.Ctx, steps: int) -> Any:
        return {"n": torch.tensor(steps)}, ctx.state
