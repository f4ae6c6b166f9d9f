"""The process and its machine: threads and memory are given back, and what is free can be had."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

import cfl
from cfl.cli import train
from cfl.core import ConfigError, machine
from cfl.runtime.sinks import NullSink
from tests import toy

CPU = torch.device("cpu")


def test_threads_are_those_asked_for_inside_and_as_before_outside():
    before = torch.get_num_threads()
    with pytest.raises(ValueError, match="inside"), machine.threads(before + 1):
        assert torch.get_num_threads() == before + 1
        raise ValueError("inside")
    assert torch.get_num_threads() == before


def test_available_memory_is_below_all_memory_and_above_free_memory():
    lines = Path("/proc/meminfo").read_text(encoding="ascii") if Path("/proc/meminfo").exists() else ""
    assert 0 < machine.free_bytes(CPU) < 2**50
    if "MemAvailable:" in lines:  # other processes allocate in between, hence the tolerance of a gibibyte
        available = 1024 * int(lines.split("MemAvailable:")[1].split()[0])
        assert abs(machine.free_bytes(CPU) - available) < 2**30


def test_the_peak_grows_with_what_is_written_to():
    before = machine.peak_bytes()
    held = torch.ones(machine.peak_bytes() // 4 + (64 << 20), dtype=torch.uint8)
    assert machine.peak_bytes(CPU) >= before > 2**20 and len(held) > 64 << 20


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_is_this_programs_and_not_that_of_the_one_that_started_it():
    held = torch.ones(1 << 30, dtype=torch.uint8)
    command = [sys.executable, "-c", "from cfl.core import machine; print(machine.peak_bytes())"]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < len(held)


def test_a_gpu_that_is_not_there_is_named(monkeypatch):
    """torch itself raises "invalid device ordinal" when the data move there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert machine.device("cuda:1") == torch.device("cuda:1") and machine.device("auto") == torch.device("cuda")
    with pytest.raises(ConfigError, match=r"device=cuda:2, but the last GPU that torch sees here is cuda:1; use that"):
        machine.device("cuda:2")


def test_there_is_a_core_at_least():
    assert machine.cores() >= 1


def test_only_the_command_changes_how_the_process_allocates(monkeypatch, tmp_path):
    """`cfl.run` is called in notebooks, whose allocator is their own; `cfl-run` and workers are processes of cfl."""
    calls = []
    monkeypatch.setattr(machine, "keep_memory", lambda: calls.append("here"))
    cfl.run(toy.config(), stream=toy.stream())
    assert calls == []
    monkeypatch.setattr(train.runner, "run", lambda *given, **options: cfl.run(toy.config(), stream=toy.stream()))
    train._run(toy.config(), tmp_path, resume=False, sink=NullSink())
    assert calls == ["here"]


def test_writers_are_awaited_and_other_threads_are_not():
    done, go = [], threading.Event()
    other = threading.Thread(target=go.wait)
    writer = threading.Thread(target=lambda: done.append(time.sleep(0.1)), name=machine.WRITER)
    for thread in (other, writer):
        thread.start()
    machine.await_writers()
    assert len(done) == 1 and other.is_alive()
    go.set()
    other.join()
