"""The process and the machine of a run: Ctrl-C, threads, memory, devices."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import psutil
import torch

from cfl.core.errors import ConfigError


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Defer the first Ctrl-C to the end of the round, so that the round is saved; a second one stops at once.

    Yields a function that tells whether Ctrl-C was pressed.
    """
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


WRITER = "cfl-writer"
"""Name of the threads that write a file in the background. Each ends when its file is written."""


def await_writers() -> None:
    """Wait for the threads called `WRITER`. A fork before would copy the locks that these threads hold."""
    for thread in threading.enumerate():
        if thread.name == WRITER:
            thread.join()


def keep_memory() -> None:
    """Let glibc keep freed blocks of up to 32 MiB, which saves the page faults of gradients at every step.

    The setting lasts for the rest of the process. So `cfl-run`, its workers, and programs that choose to call it, but
    `cfl.run` does not. With other C libraries than glibc it does nothing.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD
        mallopt(-1, 256 << 20)  # M_TRIM_THRESHOLD


@contextlib.contextmanager
def log_level(name: str, level: int) -> Iterator[None]:
    """Set the level of a logger inside the block."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


@contextlib.contextmanager
def threads(count: int) -> Iterator[None]:
    """Set the number of threads of a torch operation inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def synchronize(device: torch.device) -> None:
    """Wait for all operations queued on the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_bytes(device: torch.device | None = None) -> int:
    """Peak memory so far in bytes: of the tensors on a GPU, of the whole process on a CPU."""
    if device is not None and device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(FileNotFoundError, IndexError):  # Linux; psutil has no peak there
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    import resource  # on Linux, a started program would see the peak of the program that started it

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device: torch.device) -> int:
    """Available memory of the device in bytes; on a CPU, caches that the system can drop count as available."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def device(name: str) -> torch.device:
    """Return the device for "auto", "cpu", "cuda" or "cuda:N". Raises ConfigError if torch does not see this GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device={name}, but torch sees no GPU here; use device=cpu")
    found = torch.device(name)
    if found.index and found.index >= (count := torch.cuda.device_count()):
        raise ConfigError(f"device={name}, but the last GPU that torch sees here is cuda:{count - 1}; use that one")
    return found
