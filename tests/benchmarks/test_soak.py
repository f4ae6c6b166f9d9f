"""`benchmarks/soak.py`: what counts as the same, and that kills of some seconds leave their figures."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import cfl
from tests import toy

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.fixture
def soak(script):
    return script("soak")


@pytest.fixture
def folder(tmp_path):
    cfl.run(toy.config("tasks=2", "rounds=1"), stream=toy.stream(), output=tmp_path / "run", progress=False)
    return tmp_path / "run"


def test_a_digest_is_of_all_that_is_computed_and_of_no_seconds(soak, folder):
    before = soak.digest(folder)
    assert {Path(name).name for name in before} == {"metrics.json", "rounds.jsonl", "config.yaml", "checkpoints"}
    rows = (folder / "rounds.jsonl").read_text()
    first = json.loads(rows.splitlines()[0])
    (folder / "rounds.jsonl").write_text(rows.replace(f'"seconds": {first["seconds"]}', '"seconds": 123.5'))
    assert soak.digest(folder) == before
    (folder / "rounds.jsonl").write_text(rows.replace(f'"loss": {first["loss"]}', '"loss": 0.125'))
    assert [name for name, data in soak.digest(folder).items() if data != before[name]] == ["rounds.jsonl"]


def test_a_run_whose_files_are_of_tomorrow_is_continued(soak, tmp_path):
    options = dict(stream=toy.stream(), progress=False)
    whole = cfl.run(toy.config("tasks=2", "rounds=2"), output=tmp_path / "whole", **options)

    class Stops(cfl.Callback):
        def on_round(self, view):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cfl.run(toy.config("tasks=2", "rounds=2"), output=tmp_path / "run", callbacks=[Stops()], **options)
    soak.set_clock_back(tmp_path / "run")
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 2 and all(path.stat().st_mtime > time.time() + 23 * 3600 for path in files)
    again = cfl.run(toy.config("tasks=2", "rounds=2"), output=tmp_path / "run", resume=True, **options)
    assert again.metrics["accuracy_matrix"] == whole.metrics["accuracy_matrix"]
    assert soak.digest(tmp_path / "run") == soak.digest(tmp_path / "whole")


def test_an_unknown_part_is_refused_before_the_others_run(soak, monkeypatch, capsys):
    monkeypatch.setattr(soak.Soak, "kills", lambda self, seconds: pytest.fail("kills ran"))
    with pytest.raises(SystemExit):
        soak.main(["--parts", "kills", "folders"])
    assert "invalid choice: 'folders'" in capsys.readouterr().err


def test_figures_of_a_part_are_stored_before_the_next_one_runs(soak, monkeypatch, tmp_path):
    def workers(self, seconds):
        raise RuntimeError

    monkeypatch.setattr(soak.Soak, "kills", lambda self, seconds: {"all": 2})
    monkeypatch.setattr(soak.Soak, "workers", workers)
    with pytest.raises(RuntimeError):
        soak.main(["--parts", "kills", "workers", "--json", str(tmp_path / "soak.json")])
    stored = json.loads((tmp_path / "soak.json").read_text())
    assert stored["kills"]["all"] == 2 and stored["failures"] == []


@pytest.mark.slow
def test_kills_of_some_seconds(tmp_path):
    options = ("--minutes", "0.02", "--parts", "kills", "--json", tmp_path / "soak.json")
    made = subprocess.run(
        [sys.executable, SCRIPT, *map(str, options)], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])},
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    stored = json.loads((tmp_path / "soak.json").read_text())
    assert stored["failures"] == [] and stored["kills"]["all"] == sum(stored["kills"]["kills"].values())
    assert stored["kills"]["clock_set_back"] == (stored["kills"]["all"] + 1) // 2  # the first, the third, ...
