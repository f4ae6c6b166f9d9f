"""`benchmarks/checkpoints.py`: bytes of checkpoints with and without the states that did not change."""

import json

from cfl.core import files
from cfl.runtime import checkpoint


def test_only_the_changed_states_are_in_a_checkpoint(script, tmp_path):
    untouched = files.replace, checkpoint.save
    few = ["--clients", "8", "--cohorts", "2", "--hidden", "4", "--engine", "loop", "--rounds", "2", "--repeats", "1"]
    script("checkpoints").main([*few, "--methods", "ewc", "--json", str(tmp_path / "found.json")])
    [row] = json.loads((tmp_path / "found.json").read_text())["rows"]
    # 64 x 4 + 4 + 4 x 10 + 10 = 310 weights, in two trees of 4-byte numbers on each of 8 clients
    assert row["state_bytes"] == 310 * 2 * 4 * 8
    written = {mode: figures["checkpoint_bytes"] for mode, figures in row["modes"].items()}
    assert written["none"] == 0 and written["changed"] < row["state_bytes"] < written["all"]
    assert (files.replace, checkpoint.save) == untouched
