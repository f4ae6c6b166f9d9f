"""`benchmarks/whole_run.py`: the parts of a run's seconds."""

import pytest


def test_parts_of_a_run(script):
    timing = {
        "clients": {"train": 80.0, "train+gpse": 13.0},
        "server": {"train": 1.0, "train+gpse": 1.0},
        "measurement": {"evaluate": 3.0, "coverage": 2.0},
    }
    rows = [{"phase": "train"}] * 8 + [{"phase": "train+gpse"}, {"phase": "coverage"}]
    found = script("whole_run").split(timing, rows, 105.0)
    # A training round takes 80 / 8 = 10 s, so 3 of the 13 s are GPSE; all parts together are 80 + 13 + 2 + 5 = 100 s.
    assert found["seconds"] == {"training": 90.0, "GPSE": 3.0, "server": 2.0, "evaluate": 3.0, "coverage": 2.0}
    assert found["start"] == pytest.approx(5.0)
    assert found["beside_training"] == pytest.approx(0.1)
