"""The state of a run survives what a checkpoint does to it."""

import json

import torch

from cfl.core import tree
from cfl.runtime import checkpoint
from cfl.runtime.state import RunState


def filled():
    state = RunState({"params": {"w": torch.tensor([1.0, 2.0])}, "local/b": {"c/d": torch.tensor(3)}}, tasks=2)
    state.clients = {11: {"b/mine": torch.tensor(4.0)}, 2: {}}
    state.last_task, state.position = {11: 1, 2: 0, 5: 1}, 7
    state.accuracy_matrix[0, 0] = 0.5
    state.count({"phase": "train", "bytes_up": 3, "bytes_down": 4})
    state.count({"phase": "train", "bytes_up": 30, "bytes_down": 40})
    state.spent("clients", "train", 1.5)
    state.spent("clients", "train", 0.25)
    state.local = {"client": [2, 11], "accuracy": [0.25, 0.5], "drift": [1.0, 2.0]}
    return state


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, leaves in theirs.items():
        assert ours[name].keys() == leaves.keys()
        assert all(torch.equal(ours[name][leaf], value) for leaf, value in leaves.items())


def test_sums_by_hand():
    state = filled()
    assert state.bytes == {"train": {"up": 33, "down": 44}}
    assert state.seconds == {"clients": {"train": 1.75}, "server": {}, "measurement": {}}


def test_all_of_it_comes_back_from_a_checkpoint(tmp_path):
    state = filled()
    trees, meta, states = state.saved()
    checkpoint.save(tmp_path, state.position, trees, {**meta, "fingerprint": "x"}, states)
    back = RunState({"params": {}}, tasks=2)
    found = checkpoint.load_latest(tmp_path, "x", warn=print)
    back.restore(*found, device=torch.device("cpu"))
    assert_same(back.server, state.server)
    assert_same(back.clients, state.clients)  # ids are numbers again, and an empty state is one
    for name in ("position", "bytes", "seconds", "local", "last_task"):
        assert getattr(back, name) == getattr(state, name)
    assert torch.equal(
        torch.from_numpy(back.accuracy_matrix).nan_to_num(-1), torch.from_numpy(state.accuracy_matrix).nan_to_num(-1)
    )
    assert json.loads(json.dumps(meta))["last_task"] == {"2": 0, "5": 1, "11": 1}


def test_what_came_back_is_not_what_was_saved():
    state = filled()
    trees, meta, states = state.saved()
    back = RunState({"params": {}}, tasks=2)
    back.restore(trees | states, json.loads(json.dumps(meta)), torch.device("cpu"))
    back.accuracy_matrix[1, 1] = 0.75
    back.count({"phase": "train", "bytes_up": 1, "bytes_down": 1})
    assert state.bytes["train"]["up"] == 33 and torch.from_numpy(state.accuracy_matrix)[1, 1].isnan()


def test_what_was_saved_stays_as_it_is_when_the_run_goes_on():
    state = filled()
    trees, meta, states = state.saved()
    kept = {name: tree.clone(leaves) for name, leaves in (trees | states).items()}, json.dumps(meta)
    state.accuracy_matrix[1, 1] = 0.75
    state.count({"phase": "train", "bytes_up": 1, "bytes_down": 1})
    state.spent("server", "train", 1.0)
    state.last_task[5] = 7
    state.local["accuracy"].append(1.0)
    for leaves in state.server.values():
        leaves["new"] = torch.zeros(1)
    state.clients[11] = {"b/mine": torch.tensor(5.0)}  # a client's tree is replaced, never changed
    del state.clients[2]
    assert trees.pop("run")["acc"].nan_to_num(-1).equal(kept[0].pop("run")["acc"].nan_to_num(-1))
    assert_same(trees | states, kept[0])
    assert json.dumps(meta) == kept[1]


def test_totals_by_hand():
    state = filled()
    state.count({"phase": "gpse", "bytes_up": 100, "bytes_down": 200})
    state.spent("server", "train", 0.5)
    state.spent("measurement", "evaluate", 2.0)
    assert state.totals() == {
        "bytes_up": 133,  # 3 + 30 + 100
        "bytes_down": 244,
        "bytes_by_phase": {"gpse": {"up": 100, "down": 200}, "train": {"up": 33, "down": 44}},
        "seconds": 4.25,  # 1.5 + 0.25 + 0.5 + 2
        "local_accuracy": [0.25, 0.5],
    }
    assert list(state.totals()["bytes_by_phase"]) == ["gpse", "train"]  # by name, in whatever order phases came
    state.totals()["bytes_by_phase"]["train"]["up"] = 0
    assert state.bytes["train"]["up"] == 33  # a copy


def test_totals_of_a_run_that_has_done_nothing():
    assert RunState({"params": {}}, tasks=2).totals() == {
        "bytes_up": 0,
        "bytes_down": 0,
        "bytes_by_phase": {},
        "seconds": 0,
    }
