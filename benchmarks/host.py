"""The machine that figures are of, and how the scripts here store figures."""

import datetime
import json
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any


def store(path: Path | None, figures: Mapping[str, Any], *packages: str) -> None:
    """Write figures as JSON, with the command, the date and the machine. path: None for not at all."""
    if path is None:
        return
    made = {"command": shlex.join(["python", *sys.argv]), "date": datetime.date.today().isoformat()}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**made, "machine": about(*packages), **figures}, indent=2) + "\n")


def about(*packages: str) -> dict[str, str | int | None]:
    """Processor, cores, system, and the versions of Python and of the packages."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
    }
