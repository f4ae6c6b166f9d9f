"""Methods that no run would call are named before a run starts."""

import re
from dataclasses import dataclass

import pytest

import cfl
from cfl.contract.hook_names import check_method
from cfl.core import ConfigError, plugins
from cfl.testing import check_strategy
from tests import toy


@dataclass(frozen=True)
class Misspelt(cfl.Strategy):
    def penatly(self, params, logits, ctx):
        raise AssertionError


@dataclass(frozen=True)
class OfOtherRole(cfl.Strategy):
    def server_step(self, step, own, gathered, params, info):
        raise AssertionError


@dataclass(frozen=True)
class Strategic(cfl.LocalRegularizer):
    def absorb(self, server, mean, info, lr):
        raise AssertionError


@pytest.mark.parametrize(
    ("role", "kind", "text"),
    [
        ("strategy", Misspelt, "Misspelt.penatly: did you mean 'penalty'?"),
        ("strategy", OfOtherRole, "OfOtherRole.server_step: only local regularizers have this hook"),
        ("regularizer", Strategic, "Strategic.absorb: only strategies have this hook"),
    ],
)
def test_a_method_that_no_run_calls_is_named(role, kind, text):
    objects = {"strategy": kind()} if role == "strategy" else {"regularizers": {"own": kind()}}
    with pytest.raises(ConfigError, match=re.escape(f"no run calls {text}; the name of a helper")):
        cfl.run(toy.config(), stream=toy.stream(), **objects)
    if role == "strategy":
        with pytest.raises(Exception, match=re.escape(f"no run calls {text}")):
            check_strategy(kind())


def test_a_misspelt_method_of_a_callback_is_named():
    class Watch(cfl.Callback):
        def on_taks(self, view):
            raise AssertionError

    with pytest.raises(ConfigError, match="no run calls Watch.on_taks: did you mean 'on_task'"):
        cfl.run(toy.config(), stream=toy.stream(), callbacks=[Watch()])


def test_hooks_and_helpers_are_right():
    class Helped(cfl.Strategy):
        def finish(self, params, ctx, steps):
            return super().finish(params, ctx, steps)

        def _penatly(self):
            raise AssertionError

        def blend(self, name):
            raise AssertionError

        def losses(self):
            raise AssertionError

        def head(self):
            raise AssertionError

        def notes(self, model):
            return self.round() and self.report_of(model)

        def round(self):
            raise AssertionError

    check_method(Helped())
    for registry in (plugins.strategies, plugins.local):
        for name in registry.names():
            check_method(registry.get(name)())
