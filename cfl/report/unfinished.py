"""Runs without results: those that failed, those that were interrupted, and those that are in progress."""

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

from cfl.assembly.resolve import load
from cfl.config.overrides import assignment, flat, read_yaml
from cfl.core import ConfigError
from cfl.experiments.compare import tells_how
from cfl.report.elements import code
from cfl.report.repeat import continuing
from cfl.report.runs import FinishedRun, Found
from cfl.runtime.run_folder import RunFolder

_SHOWN = 3  # entries that are not folded


def counted(found: Found) -> str:
    """How many runs have no results, in words; empty if all have."""
    failed, others = len(found.failed), len(found.unfinished)
    words = [f"{failed} failed"] * bool(failed) + [f"{others} {'is' if others == 1 else 'are'} unfinished"] * bool(
        others
    )
    return " and ".join(words)


def parts(found: Found) -> Iterator[str]:
    """HTML with an entry for each run: what became of it, the error or the command that continues it, and its folder.

    If there are many, the last ones are folded.
    """
    entries = list(_entries(found))
    most = _SHOWN if len(entries) > _SHOWN + 1 else len(entries)
    yield from entries[:most]
    if rest := entries[most:]:
        yield f"<details><summary>{len(rest)} more</summary>{''.join(rest)}</details>\n"


def _entries(found: Found) -> Iterator[str]:
    for path, error in found.failed.items():
        text = f"{error['error']}: {error['message']}"
        yield _entry(path, found.runs, f"failed{_place(error)}.", f"<p>{escape(text)}</p>")
    for path in found.unfinished:
        if RunFolder.busy(path):
            yield _entry(path, found.runs, "is in progress.", "")
        else:
            yield _entry(path, found.runs, f"is unfinished{_done(path)}. Continue it with:", code(continuing(path)))


def _entry(path: Path, runs: Sequence[FinishedRun], text: str, below: str) -> str:
    folder = f'<p class="quiet">Folder: {escape(str(path))}</p>'
    return f'<div class="run"><p><b>{escape(_name(path, runs))}</b> {escape(text)}</p>{below}{folder}</div>\n'


def _place(error: dict[str, Any]) -> str:
    place = [f"{name} {error[name]}" for name in ("task", "phase", "round") if error.get(name) is not None]
    date = f" on {error['date'][:10]} at {error['date'][11:16]} UTC" if "date" in error else ""
    return (f" in {', '.join(place)}" if place else " after the last round") + date


def _done(path: Path) -> str:
    rounds = path / "rounds.jsonl"
    lines = rounds.read_bytes().count(b"\n") if rounds.is_file() else 0
    return f" after {lines} round{'s' * (lines != 1)}" if lines else " before the end of its first round"


def _name(path: Path, runs: Iterable[FinishedRun]) -> str:
    """Benchmark, method and seed of a run, and the options in which it differs from the nearest finished run."""
    data = read_yaml(path / "config.yaml")
    try:
        method = load(data).label
    except ConfigError:
        method = str(data.get("method"))
    like = [run for run in runs if (run.metrics["benchmark"], run.metrics["method"]) == (data["benchmark"], method)]
    options = {name: value for name, value in flat(data).items() if not tells_how(name) and name != "seed"}
    if any("stream" in run.objects for run in like):
        options.pop("tasks", None)  # finished runs of a stream of the user's own have the number of its tasks
    other = ([name for name, value in options.items() if run.options.get(name) != value] for run in like)
    texts = ", ".join(assignment(name, options[name]) for name in min(other, key=len, default=[]))
    label = f"{method} ({texts})" if texts else method
    return f"{data['benchmark']}, {label}, seed {data.get('seed', 0)}"
