"""Runs as rows of a table: a column for each figure, and its unit in the name of the column."""

from collections.abc import Mapping
from typing import Any

from cfl.config.overrides import assignment
from cfl.core import ConfigError

_SCORES = ("acc", "fgt", "learning_accuracy", "fwt", "validation_acc", "task_accuracy")
_COSTS = ("bytes_up", "bytes_down", "client_bytes", "seconds", "client_seconds", "server_seconds", "epsilon")


def row(
    metrics: Mapping[str, Any],
    scenario: str | None,
    options: Mapping[str, Any],
    timing: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """The row of a finished run: what it is, options by dotted name, fractions, bytes, seconds, accuracies by task.

    metrics: as in metrics.json; timing: as in timing.json, empty if unknown. A figure that is not defined is None.
    `task_N_learned_fraction` is the accuracy on task N right after its training, `task_N_accuracy_fraction` at the end.
    """
    names = {"method": metrics["method"], "benchmark": metrics["benchmark"], "scenario": scenario}
    names["seed"] = metrics["seed"]
    figures, matrix = {**metrics, **spent(timing)}, metrics["accuracy_matrix"]
    found = {f"{name}_fraction": figures[name] for name in _SCORES if name in figures}
    found |= {name: figures[name] for name in _COSTS if name in figures}
    for task, line in enumerate(matrix):
        found |= {f"task_{task}_learned_fraction": line[task], f"task_{task}_accuracy_fraction": matrix[-1][task]}
    for owner, own in metrics.get("callbacks", {}).items():
        found |= {f"{owner}.{name}": value for name, value in own.items()}
    found |= {"stopped_by": ", ".join(stoppers(metrics))} if stoppers(metrics) else {}
    settings = {name: _cell(name, value) for name, value in options.items() if name not in names}
    return names | settings | {name: None if value != value else value for name, value in found.items()}


def spent(timing: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return `client_seconds` and `server_seconds` from the contents of timing.json; empty if nothing was stored."""
    return {f"{who.removesuffix('s')}_seconds": sum(timing[who].values()) for who in ("clients", "server") if timing}


def stoppers(metrics: Mapping[str, Any]) -> list[str]:
    """Names of the callbacks that have skipped rounds of a run, from the contents of metrics.json."""
    return sorted({stop["callback"] for stop in metrics.get("stopped", ()) if stop["rounds"]})


def frame(row: Mapping[str, Any]) -> Any:
    """The row as a pandas DataFrame of one row. Raises ConfigError if pandas is not installed."""
    try:
        import pandas
    except ImportError:
        raise ConfigError("a frame needs pandas; run pip install pandas") from None
    return pandas.DataFrame([row])


def _cell(name: str, value: Any) -> Any:
    """A number, a text, True, False or None as it is; other values in the form of `--set`."""
    return value if value is None or isinstance(value, str | int | float) else assignment(name, value).partition("=")[2]
