"""Broadcast trees by content: what is sent, what a node keeps, and what it gets again."""

import multiprocessing
import shutil

import pytest
import torch
from flwr.app import ArrayRecord

from cfl.core import tree
from cfl.flower import link, wire
from cfl.flower.link import Link
from cfl.flower.trees import Broadcast, Missing, TreeFolder
from tests.flower.federation import Network, answer, asked

PARAMS = {"weight": torch.arange(6.0).reshape(2, 3), "bias": torch.ones(2)}  # not in the order of the alphabet
BASES = {"basis": torch.eye(4), "count": torch.tensor(3)}
SHARED = {"params": PARAMS, "strategy": BASES}


def same(one, other):
    return list(one) == list(other) and all(
        list(leaves) == list(other[owner]) and tree.equal(leaves, other[owner]) for owner, leaves in one.items()
    )


def grown(shared):
    """The broadcast of the next round: other params."""
    return {**shared, "params": {name: leaf + 1 for name, leaf in shared["params"].items()}}


def weight(leaves):
    """Bytes of a tree in a message."""
    return len(wire.array(leaves).data)


def linked(folder, nodes=1):
    """A link to nodes that answer with the trees that they see. All nodes have one folder."""
    network, kept = Network(), TreeFolder(folder)

    def app(message, context):
        try:
            found = kept.shared(asked(message)[link.SHARED], message.content.array_records[link.TREES])
        except Missing:
            return link.Message(link.missing(), reply_to=message)
        return answer(message, found)

    for node in range(1, nodes + 1):
        network.add(node, app)
    return Link(network, deadline=60.0)


def ask(line, shared, nodes=(1,)):
    """Broadcast trees; return the bytes that went down beyond the request, after a check that the trees arrived."""
    broadcast = Broadcast(shared)
    answers = line.ask("train", {node: {} for node in nodes}, broadcast)
    assert all(one.fault is None and same(one.value, shared) for one in answers.values())
    bare = wire.size(wire.pack({link.SHARED: broadcast.names}))
    return line.spent()["wire_bytes_down"] - bare * len(nodes)


def test_only_trees_that_changed_are_sent(tmp_path):
    line = linked(tmp_path)
    assert ask(line, SHARED) == weight(PARAMS) + weight(BASES)
    assert ask(line, SHARED) == 0
    assert ask(line, grown(SHARED)) == weight(PARAMS)
    assert ask(line, SHARED) == weight(PARAMS)  # a node keeps the trees of the last broadcast alone
    assert ask(line, {"params": PARAMS}) == 0


def test_a_tree_under_another_owner_is_not_sent_again(tmp_path):
    line = linked(tmp_path)
    ask(line, SHARED)
    assert ask(line, {**SHARED, "regularizer": BASES, "teacher": PARAMS}) == 0


def test_a_node_that_joins_later_gets_all_trees(tmp_path):
    line = linked(tmp_path, nodes=2)
    ask(line, SHARED)
    assert ask(line, SHARED, nodes=(1, 2)) == weight(PARAMS) + weight(BASES)


def _remove(folder):
    shutil.rmtree(folder)


def _empty(folder):
    for path in folder.iterdir():
        path.write_bytes(b"")


def _change(folder):
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("harm", [_remove, _empty, _change])
def test_a_node_that_lost_its_trees_gets_them_again(harm, tmp_path):
    folder = tmp_path / "trees"
    line = linked(folder)
    ask(line, SHARED)
    harm(folder)
    request = wire.size(wire.pack({link.SHARED: Broadcast(SHARED).names}))
    assert ask(line, SHARED) == request + weight(PARAMS) + weight(BASES)  # it was asked twice
    assert ask(line, SHARED) == 0


def test_trees_that_are_damaged_on_their_way_are_not_used(tmp_path):
    line = linked(tmp_path)

    def damage(node, message, deliver):
        for name, packed in [*message.content.array_records[link.TREES].items()]:
            message.content.array_records[link.TREES][name] = wire.array({**wire.tree(packed), "more": torch.ones(1)})
        return deliver()

    line.grid.fault = damage
    (found,) = line.ask("train", {1: {}}, Broadcast(SHARED)).values()
    assert found.fault == "it lost the trees of the broadcast"


def test_old_trees_are_removed(tmp_path):
    line = linked(tmp_path)
    for shared in (SHARED, grown(SHARED), {"params": PARAMS}):
        (tmp_path / ("0" * 32)).write_bytes(b"of an earlier run")
        ask(line, shared)
        assert {path.name for path in tmp_path.iterdir()} == Broadcast(shared).hashes


def _worker(folder, rounds, sends, start):
    """Take part in the rounds, in which the other process gets, writes and removes the same trees."""
    kept = TreeFolder(folder)
    start.wait()
    for shared in rounds:
        broadcast = Broadcast(shared)
        try:
            found = kept.shared(broadcast.names, broadcast.record(set()) if sends else ArrayRecord())
        except Missing:
            found = kept.shared(broadcast.names, broadcast.record(set()))
        assert same(found, shared)
        start.wait()


@pytest.mark.parametrize("second_sends", [True, False])
def test_two_processes_share_a_folder(second_sends, tmp_path):
    forked, rounds = multiprocessing.get_context("fork"), [SHARED]
    for _ in range(60):
        rounds.append(grown(rounds[-1]))
    start = forked.Barrier(2, timeout=60)
    workers = [forked.Process(target=_worker, args=(tmp_path, rounds, sends, start)) for sends in (True, second_sends)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    assert {path.name for path in tmp_path.iterdir()} == Broadcast(rounds[-1]).hashes
