import errno
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock

from cfl.config.overrides import read_yaml
from cfl.core import ConfigError
from cfl.runtime.run_folder import RunFolder, has_rounds, read_made_of, read_rows

ROW = {"task": 0, "phase": "train", "round": 0, "clients": 2, "loss": 0.5, "accuracy": None, "lr": 0.1, "seconds": 0.1}


def test_metrics_are_whole_ordered_and_free_of_nan(tmp_path):
    folder = RunFolder(tmp_path / "a" / "run")
    folder.write("metrics.json", {"fgt": math.nan, "acc": np.float64(0.5), "accuracy_matrix": [(0.1, float("inf"))]})
    text = (folder.path / "metrics.json").read_text()
    assert json.loads(text) == {"fgt": None, "acc": 0.5, "accuracy_matrix": [[0.1, None]]}
    assert text.index("fgt") < text.index("acc")  # in the given order, not sorted
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "checkpoints", "metrics.json"]


def test_configuration_round_trip(tmp_path):
    folder = RunFolder(tmp_path)
    folder.write_config({"local": {"weight_decay": 1e-05}, "rounds": (3, 1)})
    assert read_yaml(tmp_path / "config.yaml") == {"local": {"weight_decay": 1e-05}, "rounds": [3, 1]}


def test_no_line_twice_after_a_kill(tmp_path):
    folder = RunFolder(tmp_path)
    for number in range(3):
        folder.append_round({**ROW, "round": number})
    with (tmp_path / "rounds.jsonl").open("a") as file:
        file.write('{"round": 3, "lo')  # left incomplete by a kill
    folder.close()
    again = RunFolder(tmp_path, resume=True)
    again.truncate_rounds(2)
    again.append_round({**ROW, "round": 2})
    lines = (tmp_path / "rounds.jsonl").read_text().splitlines()
    assert [json.loads(line)["round"] for line in lines] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"was shortened: it has 3 rounds, and the checkpoint 4; put the whole file"):
        again.truncate_rounds(4)


@pytest.mark.parametrize("name", ["task", "phase", "round", "loss"])
def test_a_round_without_what_others_read_of_it_is_damage(tmp_path, name):
    folder = RunFolder(tmp_path)
    folder.append_round({key: value for key, value in ROW.items() if key != name})
    with pytest.raises(ConfigError, match=r"line 1 of '.*rounds.jsonl' is damaged"):
        folder.truncate_rounds(1)
    with pytest.raises(ConfigError, match=r"rounds.jsonl' is damaged; repeat the run, or move the file away"):
        read_rows(tmp_path)


def test_a_file_that_is_damaged_stays_as_it_is(tmp_path):
    """So that a user can mend it by hand."""
    folder = RunFolder(tmp_path)
    folder.append_round(ROW)
    with (tmp_path / "rounds.jsonl").open("ab") as file:
        file.write(b"\xff garbage\n" + json.dumps(ROW).encode() + b"\n")
    before = (tmp_path / "rounds.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"line 2 of '.*rounds.jsonl' is damaged"):
        folder.truncate_rounds(3)
    assert (tmp_path / "rounds.jsonl").read_bytes() == before
    folder.truncate_rounds(1)  # the checkpoint is of an earlier round, so the line goes anyway
    assert (tmp_path / "rounds.jsonl").read_text().count("\n") == 1


@pytest.mark.parametrize("name", ["rounds.jsonl", "metrics.json"])
def test_a_folder_with_a_run_is_refused(tmp_path, name):
    (tmp_path / name).touch()
    with pytest.raises(
        ConfigError, match=r"already holds a run; use --resume \(from Python resume=True\) or another --output"
    ):
        RunFolder(tmp_path)
    assert RunFolder(tmp_path, resume=True).checkpoints.is_dir()


def test_a_run_that_ends_while_another_waits_for_its_folder_is_kept(tmp_path, monkeypatch):
    first, acquire = RunFolder(tmp_path), FileLock.acquire

    def end_before(lock, **options):
        first.append_round(ROW)
        first.close()
        return acquire(lock, **options)

    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="already holds a run; use --resume"):
        patch.setattr(FileLock, "acquire", end_before)
        RunFolder(tmp_path)
    assert not RunFolder.busy(tmp_path)
    assert has_rounds(RunFolder(tmp_path, resume=True).path)


def test_a_lock_of_another_user_does_not_count_as_held(tmp_path, monkeypatch):
    """A report on a colleague's folder says that the run is unfinished; it fails no report."""
    RunFolder(tmp_path).close()

    def denied(lock, **options):  # what opening the file for writing raises; root may open every file
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(FileLock, "acquire", denied)
    assert not RunFolder.busy(tmp_path)
    with pytest.raises(ConfigError, match=r"\.lock' cannot be locked \(Permission denied\)"):
        RunFolder(tmp_path, resume=True)


@pytest.mark.parametrize(("read", "name"), [(read_rows, "rounds.jsonl"), (read_made_of, "made_of.json")])
def test_a_file_that_cannot_be_read_is_named(read, name, tmp_path, monkeypatch):
    def denied(path, **options):  # root may read every file
        raise PermissionError(errno.EACCES, "Permission denied")

    (tmp_path / name).touch()
    for how in ("read_bytes", "read_text"):
        monkeypatch.setattr(Path, how, denied)
    with pytest.raises(ConfigError, match=f"{name}' cannot be read .Permission denied"):
        read(tmp_path)


def test_an_error_names_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()  # not permissions, which root ignores
    with pytest.raises(ConfigError, match="file/run' cannot be written .*another --output"):
        RunFolder(tmp_path / "file" / "run")


def test_a_round_that_cannot_be_written_names_the_file(tmp_path):
    folder = RunFolder(tmp_path)
    (tmp_path / "rounds.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"rounds\.jsonl' cannot be written .*another --output"):
        folder.append_round({"round": 0})


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path, monkeypatch):
    folder = RunFolder(tmp_path)
    folder.write("metrics.json", {"acc": 0.5})

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"metrics\.json' cannot be written \(No space left on device\)"):
        folder.write("metrics.json", {"acc": 1.0})
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "checkpoints", "metrics.json"]
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"acc": 0.5}
