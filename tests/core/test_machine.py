"""The process and its machine: threads and memory are given back, and what is free can be had."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cfl.core import machine

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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
def test_the_peak_is_this_programs_and_not_that_of_the_one_that_started_it():
    held = torch.ones(1 << 30, dtype=torch.uint8)
    command = [sys.executable, "-c", "from cfl.core import machine; print(machine.peak_bytes())"]
    assert int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) < len(held)


def test_there_is_a_core_at_least():
    assert machine.cores() >= 1
