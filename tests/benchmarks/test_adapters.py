"""`benchmarks/adapters.py`: memory of a process and its children, and a run of the script."""

import json
import subprocess
import sys

import torch


def test_memory_counts_children(script):
    module = script("adapters")
    code = "import sys; held = bytearray(b'x' * 50_000_000); print('ready', flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"ready\n"
    assert 50e6 < module.memory(child.pid) < 100e6
    child.communicate()
    assert module.memory(child.pid) == 0


def test_a_case_by_hand(script, tmp_path):
    # 4 tokens a head, width 8: adapters of rank 8 beside query and value have 2 * (8 * 8 + 8 * 8) = 256 numbers, the
    # head of two classes 18, of 4 bytes each.
    module = script("adapters")
    small = ("model.name=bert_tiny", "model.layers=1", "model.width=8", "model.intermediate=8")
    overrides = [*small, *module.CASES["adapters, query and value"]]
    module.train("fedavg", 2, 1, overrides, tmp_path)
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["bytes_up"] == (256 + 18) * 4 * module.COHORT * 2
    x, y = module.texts().tasks[0].train.gather(torch.arange(6))
    assert x.shape == (6, 2, module.LENGTH) and y.tolist() == [0, 1] * 3


def test_table(script):
    row = {"peak_bytes": 2.5e9, "seconds_round": 12.34, "upload_bytes": 3e6}
    assert list(script("adapters").table({"all parameters": row}))[1].split()[-3:] == ["2.50", "12.3", "3.00"]
