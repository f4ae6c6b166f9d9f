"""Why an update is not finite: the first hook, its step, and the options to lower, under every engine."""

from dataclasses import dataclass

import pytest
import torch

import cfl
from cfl.core import UpdateError
from tests import toy

ENGINES = ("loop", "vmapped", "pool")


def run(*options, method="fedavg", **more):
    return cfl.run(toy.config(*options, method=method), stream=toy.stream(), **more)


@dataclass(frozen=True)
class Value(cfl.LocalRegularizer):
    """A penalty that is NaN."""

    def penalty(self, params, logits, ctx):
        return logits.sum() * float("nan")


@dataclass(frozen=True)
class Slope(cfl.LocalRegularizer):
    """The distance from the broadcast: 0 at the first step, where its gradient is 0 / 0."""

    weight: float = cfl.option(2.0, "weight", steep="local")
    off: float = cfl.option(0.0, "another weight", steep="local")

    def penalty(self, params, logits, ctx):
        away = (leaf - ctx.shared["params"][name] for name, leaf in params.items())
        return self.weight * sum(leaf.square().sum().sqrt() for leaf in away)


@dataclass(frozen=True)
class Adjusts(cfl.LocalRegularizer):
    """Adds 1 / (step - 2): infinity at step 2."""

    def adjust(self, grads, params, ctx):
        return {name: leaf + 1 / torch.tensor(ctx.step - 2.0) for name, leaf in grads.items()}


@pytest.mark.parametrize("engine", toy.quick("vmapped", of=ENGINES))
@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Value(), r"penalty of regularizer\.mine \(Value\) is NaN at local step 0; check what it computes"),
        (Slope(), r"the gradient of penalty of regularizer\.mine \(Slope\) is NaN at local step 0; check .*"
                  r"lower local\.lr, regularizer\.mine\.weight \(now 2\.0\) or server\.lr"),
        (Adjusts(), r"adjust of regularizer\.mine \(Adjusts\) is infinity at local step 2; lower local\.lr"),
    ],
)  # fmt: skip
def test_the_hook_is_named(engine, rule, message):
    place = r"client \d sent an update with NaN or infinity \(task 0, phase train, round 0\): "
    with pytest.raises(UpdateError, match=place + message):
        run(f"engine={engine}", regularizers={"mine": rule})
    with pytest.raises(
        UpdateError, match=r"no client's update was finite \(task 0, phase train, round 0\): " + message
    ):
        run(f"engine={engine}", "on_bad_update=exclude", regularizers={"mine": rule})


@pytest.mark.parametrize("engine", ENGINES)
def test_options_that_make_steps_too_long_are_named(engine):
    # A rate of 1e13 overflows whatever the penalty; strength and the missing limit are named because they matter.
    message = r"loss of strategy \(EWC\) is NaN at local step \d; lower local\.lr, strategy\.strength \(now 8\.0\) or "
    with pytest.raises(UpdateError, match=message + r"strategy\.max_fisher \(now none\), or leave such clients out"):
        run(f"engine={engine}", "local.lr=1e13", method="ewc")
    with pytest.raises(UpdateError, match=r"lower local\.lr, or leave such clients out"):
        run(f"engine={engine}", "local.lr=1e13", "strategy.strength=0", "strategy.max_fisher=auto", method="ewc")


def test_the_work_of_a_phase_is_named():
    class Works(cfl.Strategy):
        def plan(self, task, tasks, rounds):
            return [cfl.Phase("train", rounds), cfl.Phase("sums", train=False, work=True)]

        def work(self, params, client, shared, state, info):
            return {"sum": torch.tensor(float("inf"))}, state

    with pytest.raises(
        UpdateError, match=r"phase sums, round 0\): work of strategy \(Works\) is infinity; lower local\.lr"
    ):
        run(strategy=Works())


def test_frozen_slots_of_a_hook_are_no_obstacle():
    @dataclass(frozen=True, slots=True)
    class Slotted(cfl.LocalRegularizer):
        factor: float = float("inf")

        def adjust(self, grads, params, ctx):
            return {name: leaf * self.factor for name, leaf in grads.items()}

    with pytest.raises(UpdateError, match=r"adjust of regularizer\.mine \(Slotted\) is (NaN|infinity) at local step 0"):
        run(regularizers={"mine": Slotted()})
