"""Where the warnings of cfl are."""

import warnings

import torch

from cfl.core import warn


def inside(package, function):
    """A function of a package that calls another function."""
    names = {"__name__": f"{package}.module", "function": function}
    exec(compile("def call():\n    function()\n", f"{package}/module.py", "exec"), names)
    return names["call"]


def place(call):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return said[0].filename


def test_a_warning_is_at_the_line_that_called_cfl():
    def odd():
        warn("odd")

    assert place(odd) == __file__
    assert place(inside("cfl", inside("cfl", odd))) == __file__
    assert place(inside("cfl", torch.no_grad()(inside("cfl", odd)))) == __file__
    assert place(inside("cfl_of_another", inside("cfl", odd))) == "cfl_of_another/module.py"
