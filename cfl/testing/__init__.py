"""The conformance kit: does a strategy or a local regularizer keep the rules that engines and checkpoints rely on?

    from cfl.testing import check_strategy
    check_strategy(MyStrategy(strength=0.5))

It runs the method on toy streams and raises ConformanceError with a line for each fault: the hook, what it does, and
what to do.
"""

from __future__ import annotations

from torch import nn

from cfl.config.schema import RunConfig
from cfl.contract.regularizer import LocalRegularizer
from cfl.core.errors import CflError
from cfl.testing.hooks import Faults, HookFailed, watched
from cfl.testing.runs import check_engines, check_resume, check_rounds, planned, session
from cfl.testing.steps import check_steps
from cfl.testing.toys import toy_config, toy_stream

__all__ = ["ConformanceError", "check_strategy", "toy_config", "toy_stream"]


class ConformanceError(CflError, AssertionError):
    """A method breaks rules; the message has a line for each. faults: (hook, what is wrong)."""

    def __init__(self, method: str, faults: list[tuple[str, str]]) -> None:
        self.faults = faults
        lines = [f"  {hook}: {text}" for hook, text in faults]
        super().__init__("\n".join([f"{method} breaks {len(faults)} rule{'s' * (len(faults) > 1)}:", *lines]))


def check_strategy(method: LocalRegularizer, *, config: RunConfig | None = None) -> None:
    """Check a strategy, or a local regularizer under FedAvg, in seconds; raises ConformanceError naming each fault.

    Hooks write to nothing that they are given, draw from no global generator, keep nothing on the object, and give the
    same result again. Uploads keep their shapes. Clients do not depend on each other, and keep their state while they
    are absent. Local steps and `finish` ignore padding, and run for many clients at once. All engines agree. A run that
    is killed in any round and resumed ends with the same bytes.

    config: a run of your own on the toy stream, from `toy_config`. Three runs are looked at: a head a task, one head,
    and a network with batch normalisation; the first is killed in every round, the others in one.
    """
    if isinstance(method, type):
        raise TypeError(f"check_strategy takes an object: check_strategy({method.__name__}())")
    config, faults = config or toy_config(), Faults()
    normed = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    running = config.model_copy(update={"model": config.model.model_copy(update={"norm_stats": "running"})})
    runs = ((True, None, config, True), (False, None, config, False), (False, normed, running, False))
    for multi_head, module, settings, every_round in runs:
        stream = toy_stream(multi_head=multi_head)
        try:
            run = planned(settings, stream, watched(method, faults), module, faults)
            check_rounds(run, faults)
            if not faults and module is None:  # padding enters the statistics of a batch
                draws = check_steps(session(settings, stream, method), faults)
                if not faults:
                    check_engines(settings, stream, method, every_round, draws, faults)
            if not faults:  # what compares whole runs would only blur the faults of single hooks
                check_resume(settings, stream, method, module, every_round, faults)
        except HookFailed:
            break
        except Exception as error:
            if not faults:
                faults.add("run", f"{type(error).__name__}: {error}")
        if faults:
            break
    if faults:
        raise ConformanceError(type(method).__name__, faults.found)
