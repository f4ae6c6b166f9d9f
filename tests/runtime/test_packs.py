"""Packs: only what changed is written, whatever came before loads exactly, and the folder stays small."""

import gc
import os
import shutil
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cfl.core import CheckpointError
from cfl.runtime import checkpoint, packs, tree_file

META = {"fingerprint": "f"}
TREE = 4 + 2 * packs._NAMED  # bytes of a tree of one number: its value, and two names


def state(value):
    return {"w": torch.tensor([float(value)])}


def numbers(states):
    return {name: {leaf: value.tolist() for leaf, value in leaves.items()} for name, leaves in states.items()}


def load(folder, memory=None):
    warnings: list[str] = []
    found = checkpoint.load_latest(folder, "f", warnings.append, memory)
    return found[0], warnings


def written(folder):
    """Name of each pack on disk to the names of its trees."""
    return {path.name: list(tree_file.decode(path.read_bytes())[0]) for path in folder.glob(packs.NAMES)}


def test_only_what_changed_is_written(tmp_path):
    memory, states = packs.Packs(), {name: state(0) for name in "abcd"}
    [(first, names)] = memory.write(tmp_path, states)
    assert names == list("abcd") and written(tmp_path) == {first: list("abcd")}
    again = {name: dict(leaves) for name, leaves in states.items()}  # other dictionaries of the same leaves
    assert memory.write(tmp_path, again) == [(first, list("abcd"))]
    states = {**again, "b": state(1), "e": state(2)}  # three of four are needed
    listed = dict(memory.write(tmp_path, states))
    assert listed.pop(first) == ["a", "c", "d"]
    [(second, names)] = listed.items()
    assert names == ["b", "e"] and written(tmp_path) == {first: list("abcd"), second: ["b", "e"]}


def test_a_pack_of_which_less_than_half_is_needed_is_written_anew(tmp_path):
    memory, states = packs.Packs(), {name: state(0) for name in "abcd"}
    [(first, _)] = memory.write(tmp_path, states)
    states |= {"a": state(1), "b": state(1)}
    assert (first, ["c", "d"]) in memory.write(tmp_path, states)  # a half
    states |= {"c": state(1)}
    listed = memory.write(tmp_path, states)
    assert [names for _, names in listed] == [["a", "b"], ["c", "d"]]
    assert first not in dict(listed)


def test_an_equal_tree_of_other_leaves_and_another_order_of_leaves_are_changes(tmp_path):
    memory, leaves = packs.Packs(), {"v": torch.zeros(1), "w": torch.zeros(1)}
    checkpoint.save(tmp_path, 1, {}, META, {"a": leaves, "b": state(0)}, memory)
    for serial, own in enumerate([{"w": leaves["w"], "v": leaves["v"]}, dict(leaves), {"w": leaves["w"]}], start=2):
        checkpoint.save(tmp_path, serial, {}, META, {"a": own, "b": state(0)}, memory)
        found, _ = load(tmp_path)
        assert list(found["a"]) == list(own)


def test_packs_are_at_most_so_large(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "LARGEST", 2 * TREE)
    large = {"w": torch.zeros(1000)}  # alone larger than a pack should be
    states = {"a": state(0), "b": state(1), "c": state(2), "d": large, "e": state(3)}
    listed = packs.Packs().write(tmp_path, states)
    assert [names for _, names in listed] == [["a", "b"], ["c"], ["d"], ["e"]]


def test_many_small_packs_become_one(tmp_path, monkeypatch):
    monkeypatch.setattr(packs, "MANY", 3)
    memory, states = packs.Packs(), {}
    for count in range(1, 5):
        states = {**states, str(count): state(count)}
        assert len(memory.write(tmp_path, states)) == count
    listed = memory.write(tmp_path, {**states, "5": state(5)})
    assert [names for _, names in listed] == [["1", "2", "3", "4", "5"]]


def test_no_replaced_tree_stays_in_memory_once_the_next_checkpoint_is_written(tmp_path):
    ours, old = checkpoint.Writer(tmp_path, print), state(0)
    gone = weakref.ref(old["w"])
    for serial, own in enumerate([old, state(1)]):
        ours.save(serial, {}, META, {"a": own, "b": state(0)})
        ours.wait()
    del old, own
    gc.collect()
    assert gone() is None


SMALL = {"LARGEST": 5 * TREE, "SMALL": 2 * TREE, "MANY": 2}  # so that few trees meet every case
CHANGES = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from(["new", "gone", "same"])), max_size=6)


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(history=st.lists(st.tuples(CHANGES, st.booleans()), min_size=1, max_size=12))
def test_whatever_came_before_the_last_two_checkpoints_load_exactly(tmp_path, monkeypatch, history):
    for name, value in SMALL.items():
        monkeypatch.setattr(packs, name, value)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    folder, memory, states, value, before = tmp_path / "run", packs.Packs(), {}, 0, None
    for serial, (changes, resumed) in enumerate(history):
        for name, kind in changes:
            value += 1
            if kind == "new":
                states[name] = state(value)
            elif kind == "gone":
                states.pop(name, None)
            elif name in states:
                states[name] = dict(states[name])
        path = checkpoint.save(folder, serial, {"server": state(serial)}, META, dict(states), memory)
        found, warnings = load(folder)
        expected = {"server": {"w": [float(serial)]}, **dict(sorted(numbers(states).items()))}
        assert numbers(found) == expected and list(found) == list(expected) and warnings == []
        listed = dict(tree_file.entry(path.read_bytes())["packs"])
        there = written(folder)
        assert TREE * sum(len(there[name]) for name in listed) <= 2 * TREE * len(states)
        if before:  # the checkpoint before is whole, and there is nothing that neither needs
            needed = {name for name, _ in tree_file.entry(before[0].read_bytes())["packs"]}
            assert set(there) == needed | set(listed)
            apart = tmp_path / "apart"
            shutil.copytree(folder, apart)
            (apart / path.name).unlink()
            assert numbers(load(apart)[0]) == before[1]
            shutil.rmtree(apart)
        before = path, expected
        if resumed:
            memory = packs.Packs()
            states = {name: leaves for name, leaves in load(folder, memory)[0].items() if name != "server"}


def two_checkpoints(folder):
    """Write two checkpoints: the first has a pack of its own, the second one too, and they share a third."""
    memory, states = packs.Packs(), {"a": state(0)}
    [(own, _)] = memory.write(folder, states)
    states |= {"b": state(0), "c": state(0)}
    checkpoint.save(folder, 1, {}, META, states, memory)
    checkpoint.save(folder, 2, {}, META, {**states, "a": state(1)}, memory)
    [shared] = [name for name, trees in written(folder).items() if trees == ["b", "c"]]
    [last] = [name for name, trees in written(folder).items() if trees == ["a"] and name != own]
    return own, shared, last


@pytest.mark.parametrize("damage", ["shortened", "flipped", "swapped", "missing"])
def test_a_damaged_pack_is_reported_and_the_checkpoint_before_used(tmp_path, damage):
    own, shared, last = two_checkpoints(tmp_path)
    good = (tmp_path / last).read_bytes()
    bad = {"shortened": good[:-1], "flipped": good[:-1] + b"!", "swapped": (tmp_path / own).read_bytes()}
    (tmp_path / last).unlink() if damage == "missing" else (tmp_path / last).write_bytes(bad[damage])
    memory = packs.Packs()
    found, [warning] = load(tmp_path, memory)
    assert numbers(found) == {"a": {"w": [0.0]}, "b": {"w": [0.0]}, "c": {"w": [0.0]}}
    assert "checkpoint-000002" in warning and "damaged" in warning
    # The run goes on from there; the next checkpoint replaces the damaged one, and its pack has to be written.
    checkpoint.save(tmp_path, 2, {}, META, {**found, "a": state(1)}, memory)
    found, warnings = load(tmp_path)
    assert numbers(found)["a"] == {"w": [1.0]} and warnings == []
    (tmp_path / shared).unlink()  # both need it
    with pytest.raises(CheckpointError, match="no checkpoint in .* can be read"):
        load(tmp_path)


class Killed(BaseException):
    """Stands for SIGKILL."""


def test_killed_at_any_operation_on_files_the_last_or_the_new_checkpoint_loads(tmp_path, monkeypatch):
    """A loss of power is covered as well: names and content that are not flushed are dropped."""
    for name, value in SMALL.items():
        monkeypatch.setattr(packs, name, value)
    first = {name: state(0) for name in "abcdefg"}
    second = {**first, "a": state(1), "b": state(1), "c": state(1), "h": state(1)}  # wears a pack out
    seen = set()
    for last in range(100):
        folder, memory = tmp_path / str(last), packs.Packs()
        checkpoint.save(folder, 1, {"server": state(1)}, META, {"a": state(9)}, memory)
        checkpoint.save(folder, 2, {"server": state(2)}, META, first, memory)
        with monkeypatch.context() as patched:
            flushed = Disk(folder, patched, last)
            try:
                checkpoint.save(folder, 3, {"server": state(3)}, META, second, memory)
                ended = True
            except Killed:
                ended = False
        flushed.lose_power(tmp_path / "after")
        for each in (folder, tmp_path / "after"):
            resumed = packs.Packs()
            found, warnings = load(each, resumed)
            server = found.pop("server")["w"].item()
            assert numbers(found) == numbers({2.0: first, 3.0: second}[server]) and warnings == []
            checkpoint.save(each, 4, {"server": state(4)}, META, found, resumed)
            assert numbers(load(each)[0]) == {"server": {"w": [4.0]}, **numbers(found)}
            assert not list(each.glob("*.tmp"))
            seen.add(server)
        shutil.rmtree(tmp_path / "after")
        if ended:
            break
    # Two packs flushed and renamed, the folder flushed; the same for a checkpoint; a checkpoint and its pack removed.
    assert seen == {2.0, 3.0} and last == 5 + 3 + 2


class Disk:
    """What of a folder survives a loss of power, at worst; ends the process at the operation number `last`.

    A file's content and its name survive once they are flushed. The names of checkpoints, and removals, reach the disk
    at once.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, last: int) -> None:
        self.folder, self.left = folder, last
        self.content = {path.stat().st_ino: path.read_bytes() for path in folder.iterdir()}
        self.names = {path.name: path.stat().st_ino for path in folder.iterdir()}
        fsync, rename, remove = os.fsync, os.replace, Path.unlink

        def flush(descriptor: int) -> None:
            self.step()
            fsync(descriptor)
            inode = os.fstat(descriptor).st_ino
            there = {path.name: path.stat().st_ino for path in folder.iterdir()}
            if inode == folder.stat().st_ino:
                self.names = there
            else:
                [name] = [name for name, own in there.items() if own == inode]
                self.content[inode] = (folder / name).read_bytes()

        def replace(source: Path, target: Path) -> None:
            self.step()
            rename(source, target)
            if target.name.startswith("checkpoint"):
                self.names[target.name] = target.stat().st_ino

        def unlink(path: Path, missing_ok: bool = False) -> None:
            self.step()
            remove(path, missing_ok=missing_ok)
            self.names.pop(path.name, None)

        monkeypatch.setattr(os, "fsync", flush)
        monkeypatch.setattr(os, "replace", replace)
        monkeypatch.setattr(Path, "unlink", unlink)

    def step(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Killed

    def lose_power(self, folder: Path) -> None:
        """Write what is on the disk to another folder."""
        folder.mkdir()
        for name, inode in self.names.items():
            (folder / name).write_bytes(self.content.get(inode, b""))
