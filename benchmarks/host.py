"""The machine that figures are of, as every script here stores it beside them."""

import os
import platform
from importlib.metadata import version
from pathlib import Path


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
