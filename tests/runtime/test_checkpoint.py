"""Checkpoints: exact round trips, detection of every kind of damage, fallback, and the files that a kill leaves."""

import json
import os
import threading
from hashlib import blake2b
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from cfl.core import CheckpointError
from cfl.runtime import checkpoint

PRINT = checkpoint.fingerprint({"seed": 1})
META = {"fingerprint": PRINT, "cursor": [1, 0, 7], "acc": [0.1, 1 / 3], "note": 'a "quoted" {"checksum":"x"}\n\u00e9'}


def some_trees():
    base = torch.arange(12.0).reshape(3, 4)
    return {
        "server": {
            "params@z/head.0.weight": base.T,  # not contiguous; "z" before "a", because a tree has an order
            "params@a": base[1],  # shares memory with the previous leaf
            "again": base,
        },
        "client/3/strategy": {
            "scalar": torch.tensor(2.5),
            "count": torch.tensor([2**62 + 1, -1]),
            "mask": torch.tensor([[True, False]]),
            "double": torch.tensor([1 / 3, float("nan"), -0.0, float("inf")], dtype=torch.float64),
            "basis": torch.zeros(64, 0),
            "half": torch.tensor([1.5], dtype=torch.bfloat16),
        },
        "client/4/strategy": {},
    }


def bits(leaf):
    return leaf.contiguous().reshape(-1).view(torch.uint8).tolist() if leaf.numel() else []


def assert_same(got, expected):
    assert list(got) == list(expected)
    for name, tree in expected.items():
        assert list(got[name]) == list(tree)
        for leaf_name, leaf in tree.items():
            other = got[name][leaf_name]
            assert (other.dtype, other.shape) == (leaf.dtype, leaf.shape)
            assert bits(other) == bits(leaf)


def load(folder, fingerprint=PRINT):
    warnings: list[str] = []
    return checkpoint.load_latest(folder, fingerprint, warnings.append), warnings


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_round_trip_of_states_is_exact(tmp_path):
    checkpoint.save(tmp_path, 12, {"server": {}}, META, some_trees())
    assert [name.partition("-")[0] for name in names(tmp_path)] == ["checkpoint", "pack"]
    (trees, meta), warnings = load(tmp_path)
    assert_same(trees, {"server": {}, **dict(sorted(some_trees().items()))})
    assert meta == META and warnings == []


def test_round_trip_is_exact(tmp_path):
    path = checkpoint.save(tmp_path / "new" / "run", 12, some_trees(), META)
    assert path == tmp_path / "new" / "run" / "checkpoint-000012.safetensors"
    assert names(path.parent) == [path.name]
    (trees, meta), warnings = load(path.parent)
    assert_same(trees, some_trees())
    assert meta == META and warnings == []


def test_no_trees_at_all(tmp_path):
    checkpoint.save(tmp_path, 0, {}, META)
    assert load(tmp_path) == (({}, META), [])


def test_loaded_leaves_are_writable_and_share_no_memory(tmp_path):
    checkpoint.save(tmp_path, 0, some_trees(), META)
    (trees, _), _ = load(tmp_path)
    trees["server"]["again"].add_(1)
    assert bits(trees["server"]["params@a"]) == bits(some_trees()["server"]["params@a"])


def test_names_with_any_separator(tmp_path):
    trees = {
        "a": {"b/c": torch.zeros(1), "b\x1fc": torch.ones(2)},
        "a/b": {"c": torch.zeros(3)},
        "": {"": torch.ones(4)},
    }
    checkpoint.save(tmp_path, 0, trees, META)
    (got, _), _ = load(tmp_path)
    assert_same(got, trees)


def test_a_tensor_name_like_the_checksum_mark(tmp_path):
    trees = {'{"checksum":"': {'{\\"checksum\\":\\"': torch.ones(2)}}
    checkpoint.save(tmp_path, 0, trees, META)
    (got, _), _ = load(tmp_path)
    assert_same(got, trees)


def test_equal_input_gives_equal_bytes(tmp_path):
    shuffled = dict(reversed(META.items()))
    contents = {
        checkpoint.save(tmp_path / str(i), i, some_trees(), meta).read_bytes()
        for i, meta in enumerate([META, META, shuffled, META, shuffled])
    }
    assert len(contents) == 1


def test_the_file_is_plain_safetensors(tmp_path):
    path = checkpoint.save(tmp_path, 0, some_trees(), META)
    with safe_open(path, framework="pt") as file:
        assert len(list(file.keys())) == 9  # 3 leaves in one tree, 6 in another, none in the last
        assert json.loads(file.metadata()["cfl"])["meta"] == META


def test_every_flipped_byte_of_a_small_file_is_detected(tmp_path):
    trees = {"server": {"w": torch.arange(5.0)}}
    path = checkpoint.save(tmp_path, 3, trees, META)
    good = path.read_bytes()
    for position in range(len(good)):
        for flip in (0x01, 0x29, 0x80):  # 0x29 turns the header's padding blanks into tabs, which is valid JSON too
            damaged = bytearray(good)
            damaged[position] ^= flip
            path.write_bytes(damaged)
            warnings: list[str] = []
            with pytest.raises(CheckpointError, match="no checkpoint in .* can be read"):
                checkpoint.load_latest(tmp_path, PRINT, warnings.append)
            assert len(warnings) == 1 and str(path) in warnings[0]


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_files_are_detected(tmp_path, share):
    path = checkpoint.save(tmp_path, 3, some_trees(), META)
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_appended_bytes_are_detected(tmp_path):
    path = checkpoint.save(tmp_path, 3, some_trees(), META)
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError):
        load(tmp_path)


def test_damage_falls_back_to_the_previous_checkpoint_with_a_warning(tmp_path):
    checkpoint.save(tmp_path, 8, some_trees(), META | {"cursor": [0]})
    newest = checkpoint.save(tmp_path, 9, {"server": {}}, META)
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    (trees, meta), warnings = load(tmp_path)
    assert meta["cursor"] == [0]
    assert_same(trees, some_trees())
    assert len(warnings) == 1 and str(newest) in warnings[0] and "checksum" in warnings[0]
    # The next save replaces the damaged file.
    checkpoint.save(tmp_path, 9, {"server": {}}, META)
    assert load(tmp_path) == (({"server": {}}, META), [])


def test_an_unreadable_newest_file_is_skipped(tmp_path):
    checkpoint.save(tmp_path, 1, {}, META)
    (tmp_path / "checkpoint-000002.safetensors").mkdir()  # reading a folder raises OSError, even for root
    result, warnings = load(tmp_path)
    assert result == ({}, META)
    assert len(warnings) == 1 and "checkpoint-000002" in warnings[0]


def test_no_checkpoint_is_none(tmp_path):
    assert load(tmp_path / "missing") == (None, [])
    (tmp_path / "checkpoint-best.safetensors").write_bytes(b"not ours")
    assert load(tmp_path) == (None, [])


def test_another_configuration_is_refused(tmp_path):
    checkpoint.save(tmp_path, 1, {}, META)
    with pytest.raises(CheckpointError, match="another configuration.*--output") as error:
        load(tmp_path, checkpoint.fingerprint({"seed": 2}))
    assert str(tmp_path) in str(error.value)


def test_a_file_in_the_place_of_the_folder(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("x")
    for folder in (blocked, blocked / "below"):
        with pytest.raises(CheckpointError, match="cannot write checkpoints") as error:
            checkpoint.save(folder, 1, {}, META)
        assert str(folder) in str(error.value)
    with pytest.raises(CheckpointError, match="cannot list"):
        load(blocked)
    with pytest.raises(CheckpointError, match="cannot remove"):
        checkpoint.clear(blocked)
    assert blocked.read_text() == "x"


def test_a_failing_disk_leaves_the_old_checkpoint_and_no_temporary_file(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, 1, some_trees(), META)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        checkpoint.save(tmp_path, 2, {}, META)
    assert names(tmp_path) == ["checkpoint-000001.safetensors"]
    (trees, _), warnings = load(tmp_path)
    assert_same(trees, some_trees())
    assert warnings == []


def test_a_kill_before_the_rename_loses_nothing(tmp_path, monkeypatch):
    class Killed(BaseException):
        pass

    def killed(*paths: Path) -> None:
        raise Killed

    checkpoint.save(tmp_path, 1, {}, META)
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(Killed):
            checkpoint.save(tmp_path, 2, some_trees(), META)
    assert names(tmp_path) == ["checkpoint-000001.safetensors", "checkpoint-000002.safetensors.tmp"]
    assert load(tmp_path) == (({}, META), [])  # the temporary file is not read
    checkpoint.save(tmp_path, 3, {}, META)
    assert names(tmp_path) == ["checkpoint-000001.safetensors", "checkpoint-000003.safetensors"]


def test_the_newest_are_kept_by_number_not_by_name(tmp_path):
    (tmp_path / "config.yaml").write_text("")
    for serial in (999_998, 999_999, 1_000_000):
        checkpoint.save(tmp_path, serial, {}, META | {"serial": serial})
    # By name, "checkpoint-1000000" would come before "checkpoint-999998".
    assert names(tmp_path) == ["checkpoint-1000000.safetensors", "checkpoint-999999.safetensors", "config.yaml"]
    assert load(tmp_path)[0][1]["serial"] == 1_000_000


# Written by the version without packs: server/params = {"w": [1.5, -2]}, client/3 = {"strategy/n": [7]} (int64).
EARLIER = (
    b'\x88\x01\x00\x00\x00\x00\x00\x00{"__metadata__":{"cfl":"{\\"checksum\\":'
    b'\\"7f5f32ae02a58dcf8fbbd4d826a19f7c0a6c0972d17bb64e51a8fa64c64bf627\\",'
    b'\\"meta\\":{\\"fingerprint\\":\\"x\\",\\"position\\":7},'
    b'\\"trees\\":[[\\"server/params\\",[\\"w\\"]],[\\"client/3\\",[\\"strategy/n\\"]]]}"},'
    b'"[\\"client/3\\",\\"strategy/n\\"]":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},'
    b'"[\\"server/params\\",\\"w\\"]":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}   '
    b"\x07\x00\x00\x00\x00\x00\x00\x00\x00\x00\xc0?\x00\x00\x00\xc0"
)


def test_a_checkpoint_without_packs_loads_and_the_next_one_has_all_states(tmp_path):
    (tmp_path / "checkpoint-000007.safetensors").write_bytes(EARLIER)
    expected = {"server/params": {"w": torch.tensor([1.5, -2.0])}, "client/3": {"strategy/n": torch.tensor([7])}}
    ours, warnings = writer(tmp_path)
    trees, meta = ours.load("x")
    assert_same(trees, expected)
    assert meta == {"fingerprint": "x", "position": 7} and warnings == []
    with ours:
        ours.save(8, {"server/params": trees.pop("server/params")}, meta, trees)
    (trees, _), warnings = load(tmp_path, "x")
    assert_same(trees, expected)
    assert warnings == []


def test_clear_removes_checkpoints_only(tmp_path):
    checkpoint.save(tmp_path, 1, {}, META, some_trees())
    (tmp_path / "checkpoint-000002.safetensors.tmp").write_bytes(b"")
    (tmp_path / "pack-0.safetensors.tmp").write_bytes(b"")
    (tmp_path / "config.yaml").write_text("")
    checkpoint.clear(tmp_path)
    assert names(tmp_path) == ["config.yaml"]
    checkpoint.clear(tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_the_fingerprint_ignores_the_order_of_keys():
    # BLAKE2b of the JSON text with sorted keys and no blanks, written by hand.
    text = b'{"lr":0.1,"sizes":[1,2]}'
    expected = blake2b(text, digest_size=32).hexdigest()
    assert checkpoint.fingerprint({"sizes": [1, 2], "lr": 0.1}) == expected
    assert checkpoint.fingerprint({"lr": 0.1, "sizes": [1, 2]}) == expected
    assert checkpoint.fingerprint({"lr": 0.1, "sizes": [2, 1]}) != expected


@pytest.fixture
def slow(monkeypatch):
    """Flushes to disk wait for an event."""
    ready, fsync = threading.Event(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (ready.wait(), fsync(descriptor)))
    yield ready
    ready.set()


def writer(folder):
    warnings: list[str] = []
    return checkpoint.Writer(folder, warnings.append), warnings


def test_a_writer_writes_the_same_bytes_in_the_background(tmp_path, slow):
    ours, _ = writer(tmp_path / "run")
    ours.save(3, some_trees(), META)  # returns before the disk answers
    assert not list((tmp_path / "run").glob("*.safetensors"))
    slow.set()
    ours.wait()
    path = checkpoint.save(tmp_path / "other", 3, some_trees(), META)
    assert (tmp_path / "run" / path.name).read_bytes() == path.read_bytes()
    ours.wait()  # returns at once


def test_a_writer_writes_one_at_a_time_and_in_order(tmp_path, monkeypatch):
    active, seen, save = [], [], checkpoint.save

    def watched(folder, serial, *rest):
        active.append(serial)
        save(folder, serial, *rest)
        seen.append((serial, len(active)))
        active.remove(serial)

    monkeypatch.setattr(checkpoint, "save", watched)
    ours, _ = writer(tmp_path)
    with ours:
        for serial in range(6):
            ours.save(serial, some_trees(), META)
    assert seen == [(serial, 1) for serial in range(6)]
    assert names(tmp_path) == ["checkpoint-000004.safetensors", "checkpoint-000005.safetensors"]


def test_a_writer_without_a_folder_writes_nothing(monkeypatch):
    saved = []
    monkeypatch.setattr(checkpoint, "save", lambda *arguments: saved.append(arguments))
    ours, _ = writer(None)
    with ours:
        ours.save(1, some_trees(), META)
    assert saved == []


def test_the_next_call_raises_a_failed_write_once(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("x")
    ours, _ = writer(blocked)
    for call in (lambda: ours.save(2, {}, META), ours.wait):
        ours.save(1, {}, META)
        with pytest.raises(CheckpointError, match="cannot write checkpoints"):
            call()
        ours.wait()
    with pytest.raises(CheckpointError, match="cannot write checkpoints"), ours:
        ours.save(1, {}, META)


def test_a_failed_write_does_not_hide_the_error_that_ends_a_run(tmp_path):
    (tmp_path / "file").write_text("x")
    ours, warnings = writer(tmp_path / "file")
    with pytest.raises(ZeroDivisionError), ours:
        ours.save(1, {}, META)
        raise ZeroDivisionError
    assert len(warnings) == 1 and "cannot write checkpoints" in warnings[0]


def test_a_checkpoint_that_was_just_written_stays_whatever_others_there_are(tmp_path):
    for serial in (5, 6, 4):
        checkpoint.save(tmp_path, serial, {}, {"fingerprint": "x"})
    assert (tmp_path / "checkpoint-000004.safetensors").exists()
