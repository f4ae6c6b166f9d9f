"""The process and the machine that a run takes place on: Ctrl-C, threads, devices."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch

from cfl.core.errors import ConfigError


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Inside, the first Ctrl-C waits for the end of the round, so that the round is saved; a second stops at once."""
    asked: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(signum)

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, ask)
    try:
        yield lambda: bool(asked)
    finally:
        signal.signal(signal.SIGINT, before)


def keep_memory() -> None:
    """Have the C library keep freed blocks of up to 32 MiB: gradients come and go at every step, and so do page faults.

    That is for the rest of the process. Elsewhere than in glibc nothing is done.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Inside, torch uses that many threads in an operation."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was told to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device | None = None) -> int:
    """The most memory so far: tensors on a GPU, all of this process on a CPU."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(FileNotFoundError, IndexError):  # not on all systems
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    import resource  # of a program started by another one, Linux has the other's peak here

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device: torch.device) -> int:
    """Memory of the device that can be had; files that the system keeps in memory give way."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1])
    pages = os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else os.sysconf("SC_PHYS_PAGES")
    return pages * os.sysconf("SC_PAGE_SIZE")


def device(name: str) -> torch.device:
    """The device of a configuration's "auto", "cpu", "cuda" or "cuda:N"; ConfigError where it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch sees no GPU here; use device=cpu")
    return torch.device(name)
