"""Runs that turn out not to be finite, and networks of which nothing trains: one error that names the place.

CASES: id -> (call, class of the error, what its message says); a call may take a temporary folder.
WELCOME: id -> call whose result is true.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import cfl
from cfl.core import ConfigError, UpdateError
from tests import toy


def run(*options: str, method: str = "fedavg", **more: Any) -> cfl.Result:
    return cfl.run(toy.config(*options, method=method), stream=toy.stream(), **more)


def spoiled(tree: dict[str, torch.Tensor], by: float = float("nan")) -> dict[str, torch.Tensor]:
    return {name: leaf * by if leaf.is_floating_point() else leaf for name, leaf in tree.items()}


def strategy(**hooks: Callable[..., Any]) -> cfl.Strategy:
    return type("Mine", (cfl.Strategy,), hooks)()


def regularizer(**hooks: Callable[..., Any]) -> dict[str, cfl.LocalRegularizer]:
    return {"mine": type("Term", (cfl.LocalRegularizer,), hooks)()}


def network(train: bool) -> nn.Module:
    module = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2))
    return module.requires_grad_(False) if not train else module


def frozen_backbone() -> nn.Module:
    module = network(train=True)
    module[0].requires_grad_(False)
    return module


def keeps_frozen(method: str) -> bool:
    module = frozen_backbone()
    result = cfl.run(toy.config(method=method), stream=toy.stream(), model=module)
    return torch.equal(result.params["0.weight"], module[0].weight) and not torch.equal(
        result.params["2.weight"], module[2].weight
    )


def base(hook: str) -> Callable[..., Any]:
    return getattr(cfl.Strategy, hook)


def absorbed(self: Any, server: Any, mean: Any, info: Any, lr: float) -> Any:
    after = base("absorb")(self, server, mean, info, lr)
    return {**after, "params": spoiled(after["params"])}


@dataclass(frozen=True)
class Root(cfl.LocalRegularizer):
    """A distance whose gradient is NaN at distance 0."""

    weight: float = cfl.option(2.0, "weight", steep="local")

    def penalty(self, params: Any, logits: Any, ctx: Any) -> Any:
        away = (leaf - ctx.shared["params"][name] for name, leaf in params.items())
        return self.weight * sum(leaf.square().sum().sqrt() for leaf in away)


INF = torch.tensor(torch.inf)
TRAIN = r"\(task 0, phase train, round 0\)"


def peeks(hook: str) -> cfl.Strategy:
    """Measures a mean in a diagnostic phase, which nothing protects, and puts it into the model or keeps it."""

    def plan(self: Any, task: int, tasks: int, rounds: int) -> list[cfl.Phase]:
        return [cfl.Phase("train", rounds), cfl.Phase("look", train=False, work=True, diagnostic=True)]

    def work(self: Any, params: Any, client: Any, shared: Any, state: Any, info: Any) -> Any:
        return {"mean": next(client.batches(4)).x.mean()}, state

    def absorb(self: Any, server: Any, mean: Any, info: Any, lr: float) -> Any:
        if "work" not in mean:
            return base("absorb")(self, server, mean, info, lr)
        moved = {name: leaf + mean["work"]["mean"] for name, leaf in server["params"].items()}
        return {**server, "params": moved} if hook == "moves" else {**server, "seen": mean["work"]}

    return strategy(plan=plan, work=work, absorb=absorb)


CASES: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "a diagnostic phase under secure sums that moves the model": (
        lambda: run("secagg=sum", strategy=peeks("moves")), UpdateError,
        r"absorb changes the broadcast \(task 0, phase look, round 0\), .*set diagnostic=False",
    ),
    "a loss that is NaN with a finite gradient": (
        lambda: run(strategy=strategy(loss=lambda self, logits, ctx: logits.mean() + torch.nan)), UpdateError,
        rf"the training loss is not finite, .* {TRAIN}; lower local.lr, or check the loss of the strategy",
    ),
    "a first tree of a regularizer with NaN": (
        lambda: run(regularizers=regularizer(init_shared=lambda self, params, model: spoiled(params))), UpdateError,
        r"init_shared of regularizer\.mine \(Term\) returns NaN in 'own/",
    ),
    "server.lr overflows": (
        lambda: run("server.lr=1e39"), UpdateError,
        rf"absorb of strategy .*(NaN|infinity) in 'params/.*' {TRAIN}; lower server\.lr \(now 1e\+39\)",
    ),
    "server.lr overflows, with a folder": (
        lambda tmp_path: run("server.lr=1e39", output=tmp_path), UpdateError, r"lower server\.lr",
    ),
    "absorb returns NaN": (
        lambda: run(strategy=strategy(absorb=absorbed)), UpdateError,
        rf"absorb of strategy \(Mine\) returns NaN in 'params/.*' {TRAIN}",
    ),
    "server_step returns NaN": (
        lambda: run(regularizers=regularizer(server_step=lambda self, step, own, *_: (spoiled(step), own))),
        UpdateError, rf"server_step of regularizer\.mine \(Term\) returns NaN in 'step/.*' {TRAIN}",
    ),
    "server_step returns an infinite step": (
        lambda: run(regularizers=regularizer(server_step=lambda self, step, own, *_: (spoiled(step, torch.inf), own))),
        UpdateError, rf"server_step of regularizer\.mine \(Term\) returns (NaN|infinity) in 'step/.*' {TRAIN}",
    ),
    "provide returns NaN": (
        lambda: run(regularizers=regularizer(provide=lambda self, own, info: {"c": torch.tensor(torch.nan)})),
        UpdateError, rf"provide of regularizer\.mine \(Term\) returns NaN in 'sent/c' {TRAIN}",
    ),
    "broadcast returns NaN": (
        lambda: run(strategy=strategy(broadcast=lambda self, server, info: {
            "params": spoiled(base("broadcast")(self, server, info)["params"])})),
        UpdateError, rf"broadcast of strategy \(Mine\) returns NaN in 'params/.*' {TRAIN}; check what broadcast",
    ),
    "init_server returns NaN": (
        lambda: run(strategy=strategy(init_server=lambda self, params, model: {"own": {"c": torch.tensor(torch.nan)}})),
        UpdateError, r"init_server of strategy \(Mine\) returns NaN in 'own/c' \(before the first round\)",
    ),
    "begin_task returns NaN": (
        lambda: run(strategy=strategy(begin_task=lambda self, server, task, model: {
            **server, "own": {"c": torch.tensor(torch.nan)}})),
        UpdateError, r"begin_task of strategy \(Mine\) returns NaN in 'own/c' \(task 1\)",
    ),
    "serve returns NaN": (
        lambda: run(strategy=strategy(serve=lambda self, server, task: spoiled(server["params"]))),
        UpdateError, r"outputs are NaN or infinity for 40 of 40 test samples of task 0: its parameter '.*'",
    ),
    "finite weights whose outputs overflow": (
        lambda: run("server.lr=1e20", "rounds=1"), UpdateError,
        r"outputs are NaN or infinity for \d+ of 40 test samples of task 0: its weights are finite, but too large",
    ),
    "a penalty is NaN": (
        lambda: run(regularizers=regularizer(penalty=lambda self, params, logits, ctx: logits.sum() * torch.nan)),
        UpdateError, rf"client \d .* {TRAIN}: penalty of regularizer\.mine \(Term\) is NaN at local step 0; check what",
    ),
    "a penalty's gradient is NaN": (
        lambda: run(regularizers={"mine": Root()}), UpdateError,
        r"the gradient of penalty of regularizer\.mine \(Root\) is NaN at local step 0; .*regularizer\.mine\.weight",
    ),
    "a loss is NaN, and such clients are left out": (
        lambda: run("on_bad_update=exclude", strategy=strategy(loss=lambda self, logits, _: logits.sum() * torch.nan)),
        UpdateError, rf"no client's update was finite {TRAIN}: loss of strategy \(Mine\) is NaN at local step 0",
    ),
    "adjust returns infinity": (
        lambda: run("engine=vmapped", regularizers=regularizer(adjust=lambda self, grads, params, ctx: {
            name: leaf.abs() + torch.inf for name, leaf in grads.items()})),
        UpdateError, r"adjust of regularizer\.mine \(Term\) is infinity at local step 0",
    ),
    "local.lr overflows": (
        lambda: run("local.lr=1e15"), UpdateError, r"client \d .* is NaN at local step [1-9]\d*; lower local\.lr, or",
    ),
    "local.lr overflows under EWC": (
        lambda: run("local.lr=1e13", method="ewc"), UpdateError,
        r"lower local\.lr, strategy\.strength \(now 8\.0\) or strategy\.max_fisher \(now none\)",
    ),
    "local.lr overflows under FedProx": (
        lambda: run("local.lr=1e15", "regularizer.fedprox.mu=5", method="fedavg+fedprox"), UpdateError,
        r"lower local\.lr or regularizer\.fedprox\.mu \(now 5\.0\)",
    ),
    "a network of which nothing trains": (
        lambda: run(model=network(train=False)), ConfigError, r"requires_grad=False, so nothing trains; call",
    ),
    "max_fisher of another name": (
        lambda: toy.config("strategy.max_fisher=automatic", method="ewc"), ConfigError,
        r"strategy\.max_fisher must be a number in \(0, inf\) or 'auto' or none, not 'automatic'",
    ),
}  # fmt: skip

WELCOME: dict[str, Callable[[], Any]] = {
    "a diagnostic phase under secure sums": lambda: run("secagg=sum", strategy=peeks("keeps")).params,
    "a running minimum that starts at infinity": lambda: (
        run(strategy=strategy(init_server=lambda self, params, model: {"best": {"loss": INF}})).params
    ),
    "a frozen backbone": lambda: keeps_frozen("fedavg"),
    "a frozen backbone under FOT": lambda: keeps_frozen("fot"),
    "max_fisher=auto": lambda: run("strategy.max_fisher=auto", method="ewc").metrics["acc"] > 0,
    "max_fisher=none": lambda: toy.config("strategy.max_fisher=none", method="ewc").strategy["max_fisher"] is None,
}
