"""Conformance kit: check that a strategy or a local regularizer keeps the rules of engines and checkpoints.

    from cfl.testing import check_strategy
    check_strategy(MyStrategy(strength=0.5))

The kit runs the method on toy streams. It raises ConformanceError with a line per fault: hook, fault and remedy.
"""

from typing import Any

from torch import nn

from cfl.config.schema import RunConfig
from cfl.contract import LocalRegularizer, Strategy
from cfl.contract.kinds import kind
from cfl.core import CflError
from cfl.streams import selected
from cfl.testing.hooks import Faults, watched
from cfl.testing.runs import check_engines, check_later_tasks, check_resume, check_rounds, planned, session
from cfl.testing.steps import check_steps
from cfl.testing.toys import toy_config, toy_stream

GROWING = "with a growing head"

__all__ = ["ConformanceError", "check_strategy", "toy_config", "toy_stream"]


class ConformanceError(CflError, AssertionError):
    """A method breaks rules; the message has a line per fault.

    faults: pairs of hook and fault; stream: describes the toy stream on which they were found.
    """

    def __init__(self, method: str, faults: list[tuple[str, str]], stream: str) -> None:
        self.faults = faults
        title = f"{method} breaks {len(faults)} rule{'s' * (len(faults) > 1)} on the toy stream {stream}:"
        super().__init__("\n".join([title, *(f"  {hook}: {text}" for hook, text in faults)]))


def check_strategy(method: Any, *, config: RunConfig | None = None) -> None:
    """Check a strategy, or a local regularizer under FedAvg, in seconds; raise ConformanceError for its faults.

    Rules for hooks: return what they promise, without NaN; do not modify arguments, do not draw from a global
    generator, keep no state on the object, and return the same result for the same arguments. Uploads keep their
    shapes. Clients do not depend on each other, and the state of an absent client does not change. The inferred task of
    a sample does not depend on the others in its batch. Trees in `kept` do not change within a task. Local steps and
    `finish` ignore padding, and run under vmap for many clients. All engines agree. A run that is killed in any round
    and resumed ends with the same bytes, and so does a run that has its last task later, unless the strategy has
    `not_extendable`.

    config: another run on the toy stream, from `toy_config`. The kit makes four runs: with a head per task, with one
    head, with batch normalisation, and, for a strategy without `not_class_incremental`, with a growing head. It kills
    the first run in every round, and the others in one round. It checks steps and engines in the first two runs.
    """
    if not isinstance(method, LocalRegularizer):
        hint = f": check_strategy({method.__name__}())" if isinstance(method, type) else f", not {kind(method)}"
        raise TypeError(f"check_strategy takes a strategy or a local regularizer as an object{hint}")
    config, faults = config or toy_config(), Faults()
    normed = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    running = config.model_copy(update={"model": config.model.model_copy(update={"norm_stats": "running"})})
    runs = [
        ("with a head for each task", True, None, config, True),
        ("with one head", False, None, config, False),
        ("with one head, for a model with batch normalisation", False, normed, running, False),
    ]
    if isinstance(method, Strategy) and not method.not_class_incremental:
        runs.append((GROWING, True, None, config.model_copy(update={"scenario": "class"}), False))
    for name, multi_head, module, settings, every_round in runs:
        stream = selected(toy_stream(multi_head=multi_head), config.tasks)
        try:
            run = planned(settings, stream, watched(method, faults), module, faults)
            check_rounds(run, session(settings, stream, method, module), faults)
            if not faults and module is None and name != GROWING:  # batch normalisation depends on padding
                check_steps(session(settings, stream, method), faults)
                if not faults:
                    check_engines(settings, stream, method, every_round, faults)
            if not faults:  # comparisons of whole runs would only repeat the faults of single hooks
                check_resume(settings, stream, method, module, every_round, faults)
                check_later_tasks(settings, stream, method, module, faults)
        except Exception as error:
            if not faults:  # else a hook failed, and its fault is recorded
                faults.add("run", f"{type(error).__name__}: {error}")
        if faults:
            raise ConformanceError(type(method).__name__, faults.found, name)
