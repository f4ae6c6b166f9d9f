"""Store finished runs under benchmarks/results/runs, and write benchmarks/RESULTS.md from all that are stored.

    python benchmarks/results.py [RUN_OR_FOLDER ...]

A stored run is config.yaml, metrics.json, timing.json, and machine.json with the machine and the day it ended.
"""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from pathlib import Path

from host import about

from cfl.compare import place
from cfl.config import load
from cfl.overrides import read_yaml
from cfl.record import write_json

HERE = Path(__file__).parent
RUNS, PAGE = HERE / "results" / "runs", HERE / "RESULTS.md"


def store(run: Path, runs: Path = RUNS) -> Path:
    """Copy what is worth keeping of a finished run; one that is stored already stays as it is."""
    config = load(read_yaml(run / "config.yaml"))
    target = place("", config, runs / config.scale / config.benchmark).folder
    if not target.exists():
        target.mkdir(parents=True)
        for name in ("config.yaml", "timing.json", "metrics.json"):
            shutil.copy(run / name, target)
        ended = datetime.fromtimestamp((run / "metrics.json").stat().st_mtime, UTC)
        write_json(target / "machine.json", {"ended": f"{ended:%Y-%m-%d}", **about("torch")})
    return target
