"""The promises of hooks: which calls are checked, and which names metrics.json has of its own."""

from inspect import getmembers, getsourcelines, isfunction

import pytest
import torch

import cfl
from cfl.contract import LocalRegularizer, Strategy
from cfl.contract.composed import STRATEGY, ComposedMethod
from cfl.contract.promises import FIGURES, PROMISES
from cfl.core import HookError
from cfl.testing import toy_config, toy_stream
from tests.toy import context

GRADS = {"w": torch.tensor(3.0)}
CTX = context({"params": GRADS}, {}, None)


class Fades(LocalRegularizer):
    """Returns the gradient once, then nothing."""

    def __init__(self):
        self.calls = []

    def adjust(self, grads, params, ctx):
        self.calls.append(ctx)
        return grads if len(self.calls) % 2 else {}


def test_every_hook_has_a_promise():
    hooks = {name for name, _ in getmembers(Strategy, isfunction) if not name.startswith("_")}
    assert hooks == set(PROMISES) - {"around gradient"}


def test_a_hook_of_a_step_is_checked_at_its_first_call_alone():
    member = Fades()
    composed = ComposedMethod({STRATEGY: Strategy(), "fades": member})
    assert composed.adjust(GRADS, GRADS, CTX) == GRADS
    assert composed.acting["adjust"]["fades"] == member.adjust  # the hook itself, so that later steps cost nothing
    assert composed.adjust(GRADS, GRADS, CTX) == {}
    member.calls.append(None)
    with pytest.raises(HookError, match=r"^Fades.adjust returned a tree without 'w'; it has to return a tree with"):
        composed.afresh().adjust(GRADS, GRADS, CTX)
    assert composed.adjust(GRADS, GRADS, CTX) == GRADS  # not checked: the other object is


def test_an_error_in_a_hook_is_named_with_its_line():
    class Divides(Strategy):
        @torch.no_grad()  # its own file is not that of the hook
        def heads(self, task, tasks):
            return self.named(task, tasks)

        def named(self, task, tasks):
            return tuple(range(task // (tasks - tasks)))

    line = getsourcelines(Divides.named)[1] + 1  # the innermost in this file, below the `def`
    text = rf"^Divides\.heads raises ZeroDivisionError: .* \(line {line} of test_promises\.py\)$"
    with pytest.raises(HookError, match=text):
        ComposedMethod({STRATEGY: Divides()}).strategy.heads(0, 2)


def test_members_keep_their_attributes_and_other_methods():
    composed = ComposedMethod({STRATEGY: Strategy(), "fades": Fades()})
    assert composed.strategy.sends == Strategy.sends and composed.regularizers["fades"].turn == 0
    assert composed.regularizers["fades"].steps_see_state


def test_a_hook_of_a_later_step_is_named_by_computing_the_step_again():
    class Late(LocalRegularizer):
        def penalty(self, params, logits, ctx):
            return logits[:, 9].mean() if ctx.step == 2 else 0.0

    text = r"training failed at client \d .*, round 0\): Late.penalty raises IndexError: index 9 is out of bounds"
    with pytest.raises(cfl.errors.UpdateError, match=text):
        cfl.run(toy_config("tasks=1"), stream=toy_stream(1), regularizers={"late": Late()})


WIRE = ("wire_bytes_up", "wire_bytes_down")  # of runs on nodes
STOPPED = ("stopped", "callbacks", "epsilon_without_skipped")  # of runs with callbacks


def test_the_figures_of_a_run_are_known():
    private = ["dp.level=client", "dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson"]
    config = toy_config("tasks=2", "rounds=1", "eval_local=1", "eval_later=true", "validation=0.25", *private)
    found = cfl.run(config, stream=toy_stream(2, multi_head=False)).metrics
    others = {"task_accuracy", *STOPPED, *WIRE}
    assert set(found) - {"subspace_use"} == FIGURES - others  # subspace_use is the strategy's own


@pytest.mark.parametrize("name", ["task_accuracy", *WIRE])
def test_a_strategy_cannot_report_what_only_some_runs_have_of_their_own(name):
    text = PROMISES["report"].fault({name: 1.0}, Strategy(), {}, None)
    assert text == f"a figure '{name}', which every run has of its own"
