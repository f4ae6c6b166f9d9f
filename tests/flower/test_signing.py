"""The consistency check of secure sums on nodes: registered keys, and a server that breaks the protocol."""

import re
import shutil
import subprocess

import pytest
import torch
from flwr.app import ArrayRecord, RecordDict

from cfl.aggregation.secagg_client import MASK, PUBLIC, SELF
from cfl.core import ConfigError, tree
from cfl.flower import link, wire
from cfl.flower.link import Link
from cfl.flower.signing import SigningKeys
from cfl.flower.trees import Broadcast
from tests import toy
from tests.flower.federation import Clock, Federation, Log, at, read, signing_keys
from tests.flower.test_deployment import ALL

SIGNED = ("tasks=1", "rounds=2", *ALL, "secagg=full", "secure.consistency=true", "secure.quorum=0.8")  # 5 of 6


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(link, "time", Clock())


@pytest.fixture
def federation(tmp_path):
    """Three nodes with two clients each, of which node 1 has the clients 1 and 4, after a round with the check."""
    found = Federation(toy.config(*SIGNED, method="fedavg"), tmp_path)
    found.session().round(0)
    return found


def requested(federation, kind):
    """The last request of a kind to node 1."""
    sent = [one for one in federation.network.sent if (one.node, one.kind) == (federation.nodes[1], kind)]
    return wire.unpack(read(sent[-1].request))


def asked(federation, kind, request):
    """Node 1's answer to a request, and why it refuses."""
    id = federation.nodes[1]
    found = Link(federation.network, 60.0).ask(f"query.{kind}", {id: request})[id]
    return found.value, found.fault


# --- a server that breaks the protocol -------------------------------------------------------------------------------


def test_a_node_signs_one_list_also_after_it_has_read_its_memory_again(federation):
    request = requested(federation, "query.confirm")
    assert request["clients"] == {1: (*range(6),), 4: (*range(6),)}
    signed, fault = asked(federation, "confirm", request)
    assert fault is None and {len(one) for one in signed.values()} == {64}
    text = "client 1 refuses to sign a second list of clients that uploaded"
    assert asked(federation, "confirm", {**request, "clients": {1: [0, 1, 2, 3, 4]}}) == (None, text)


@pytest.mark.parametrize("count", [0, 4])
def test_a_node_reveals_nothing_for_a_list_that_too_few_have_signed(count, federation):
    request = requested(federation, "query.unmask")
    assert len(request["signatures"]) == 6
    few = {id: request["signatures"][id] for id in range(count)}
    found = asked(federation, "unmask", {**request, "signatures": few})
    assert found[0] is None
    assert found[1].startswith(f"{count} clients signed the list of clients that uploaded, client 1 needs 5")


def test_a_node_signs_for_its_own_clients_in_the_round_of_their_keys(federation):
    request = requested(federation, "query.confirm")
    listed = request["clients"][1]
    assert asked(federation, "confirm", {**request, "clients": {0: listed}}) == (None, "node 'n1' has no client 0")
    assert asked(federation, "confirm", {**request, "round": 1}) == (None, "node 'n1' has keys of another round")


def test_a_node_reveals_nothing_without_signatures(federation):
    request = requested(federation, "query.unmask")
    for signatures in (None, {id: b"" for id in range(6)}, dict.fromkeys(range(6), "text")):
        value, fault = asked(federation, "unmask", {**request, "signatures": signatures})
        assert value is None and fault.startswith(
            "0 clients signed the list of clients that uploaded, client 1 needs 5"
        )


def test_a_node_reveals_nothing_against_the_list(federation):
    request = requested(federation, "query.unmask")
    assert set(request["clients"][1].values()) == {SELF}
    found = asked(federation, "unmask", {**request, "clients": {1: {0: MASK}}})
    assert found == (None, "client 1 is asked for a secret of client 0 against the list")


def test_a_node_refuses_keys_that_their_owner_did_not_sign(federation):
    """The server puts keys of its own in the place of client 0's, with client 0's signature."""
    keys, near = asked(federation, "keys", {"round": 0, "clients": {1: 5}})[0], requested(federation, "query.shares")
    assert len(keys[1]) == 2 * PUBLIC + 64
    false = {**near["clients"][1], 0: keys[1][: 2 * PUBLIC] + near["clients"][1][0][2 * PUBLIC :]}
    fault = asked(federation, "shares", {"round": 0, "clients": {1: false}})[1]
    assert fault.startswith("client 1 got public keys that client 0 did not sign in this round")
    assert asked(federation, "shares", {"round": 0, "clients": {1: near["clients"][1]}})[1] is None


def test_a_node_refuses_the_signed_keys_of_another_round(federation):
    asked(federation, "keys", {"round": 1, "clients": {1: 5}})
    near = requested(federation, "query.shares")["clients"][1]
    fault = asked(federation, "shares", {"round": 1, "clients": {1: near}})[1]
    assert fault.startswith("client 1 got public keys that client 0 did not sign in this round")


def test_a_node_shares_the_secrets_of_a_client_once(federation):
    asked(federation, "keys", {"round": 0, "clients": {1: 5}})
    near = requested(federation, "query.shares")["clients"][1]
    assert asked(federation, "shares", {"round": 0, "clients": {1: near}})[1] is None
    others = {id: near[id] for id in (0, 2, 3, 4)}
    text = "client 1 refuses to share its secrets a second time"
    assert asked(federation, "shares", {"round": 0, "clients": {1: others}}) == (None, text)


@pytest.mark.parametrize(("threshold", "others"), [(2, [0]), (4, [0, 2, 3, 4]), (5, [0, 2, 3, 4, 6])])
def test_a_node_refuses_groups_other_than_the_cohort(threshold, others, federation):
    """The cohort has all six clients, of which five have to stay."""
    asked(federation, "keys", {"round": 0, "clients": {1: threshold}})
    near = requested(federation, "query.shares")["clients"][1]
    text = "the server asks client 1 for a sum over others than the cohort of the round"
    group = {id: near.get(id, near[0]) for id in others}
    assert asked(federation, "shares", {"round": 0, "clients": {1: group}}) == (None, text)


@pytest.mark.parametrize(("others", "threshold", "fits"), [(7, 5, False), (8, 6, True)])
def test_a_node_with_data_of_its_own_refuses_a_group_in_which_two_lists_could_be_signed(
    others, threshold, fits, tmp_path
):
    """Such a node does not know the cohort. Two of 20 clients may be accomplices, who sign both lists. Of 8 clients
    that leaves six, who sign one each: five signatures under both lists. Of 9 clients it leaves seven, and one list has
    2 + 3 signatures at most. The quorum of 0.6 is 5 of 8, and 6 of 9."""
    sizes = ("partition.clients=20", "cohort=20", "local.batch_size=2")
    options = (*sizes, "secagg=full", "secure.consistency=true", "secure.quorum=0.6")
    federation = Federation(toy.config("tasks=1", "rounds=1", *options, method="fedavg"), tmp_path, nodes=1)
    id, clients = federation.start(0, own_data=True), dict.fromkeys(range(others + 1), threshold)
    link = Link(federation.network, 60.0)
    keys = link.ask("query.keys", {id: {"round": 0, "clients": clients}})[id].value
    near = {other: key for other, key in keys.items() if other != 1}
    found = link.ask("query.shares", {id: {"round": 0, "clients": {1: near}}})[id]
    refused = f"two lists of {others + 1} clients could be signed by the {threshold} that client 1 is to ask for"
    assert found.fault == (None if fits else f"{refused}; raise secure.quorum")


def test_clients_of_a_run_without_the_check_sign_nothing(tmp_path):
    federation = Federation(toy.config(*SIGNED[:-2], method="fedavg"), tmp_path)
    federation.session().round(0)
    found = asked(federation, "confirm", {"round": 0, "clients": {1: [*range(6)]}})
    assert found == (None, "the run has secure.consistency=false, so its clients sign nothing")


def test_clients_without_data_of_the_task_are_no_obstacle(tmp_path):
    """Of 12 clients half have data. Server and nodes count accomplices among all 12, so that they agree."""
    options = (
        "partition.clients=12",
        "partition.task_share=0.5",
        "cohort=12",
        "local.batch_size=2",
        *SIGNED[2 + len(ALL) :],
    )
    federation, log = Federation(toy.config("tasks=2", "rounds=1", *options, method="fedavg"), tmp_path), Log()
    federation.run(log)
    assert [row["aborted"] for row in log.rows] == [None, None] and [row["clients"] for row in log.rows] == [6, 6]


def test_a_round_in_which_the_server_splits_the_clients_is_aborted(tmp_path):
    """Node 1 is told that client 0 did not upload: of the other list there are four signatures, and five are needed."""
    federation, log = Federation(toy.config(*SIGNED, method="fedavg"), tmp_path), Log()

    def split(message, deliver):
        request = wire.unpack(message.content)
        lists = {id: listed[1:] for id, listed in request["clients"].items()}
        message.content = wire.pack({**request, "clients": lists})
        return deliver()

    federation.network.fault = at("query.confirm", {0}, {federation.nodes[1]}, split)
    federation.run(log)
    first, second = log.rows
    assert "0 of 6 clients are left after stage unmask" in first["aborted"] and second["aborted"] is None
    assert "4 clients signed the list of clients that uploaded, client 0 needs 5" in first["missing"][0]


@pytest.mark.parametrize("what", ["model", "learning rate"])
def test_a_server_that_tells_one_client_something_else_gets_random_numbers(what, tmp_path):
    """All nodes but one get zeros as their model, or another learning rate, which nodes with data of their own cannot
    check. Random entries of 64 bits, 24 of them behind the point, reach 2^63 / 2^24 = 5.5e11, and 9.2e10 as a mean of 6
    clients. So an entry is below 1e6 with probability 1.1e-5, and two or more are with 1.2e-10 at most."""
    settings = toy.config("tasks=1", "rounds=1", *SIGNED[2:], "agg.weights=uniform", method="fedavg")
    federation = Federation(settings, tmp_path, nodes=6)
    for number in range(6) if what == "learning rate" else ():
        federation.stop(number)
        federation.start(number, own_data=True)

    def others(message, deliver):
        request, trees = wire.unpack(message.content), message.content.array_records[link.TREES]
        if what == "learning rate":
            request["info"]["lr"] = 0.0
        else:
            model, leaves = request[link.SHARED]["sent/params"]
            zeros = Broadcast({"params": tree.map(torch.zeros_like, wire.tree(trees[model]))})
            request[link.SHARED]["sent/params"] = (*zeros.hashes, leaves)
            trees = ArrayRecord({**trees, **zeros.record(but=set())})
        message.content = RecordDict({**wire.pack(request), link.TREES: trees})
        return deliver()

    lied_to = [federation.nodes[number] for number in range(1, 6)]
    federation.network.fault = at("train", {0}, lied_to, others)
    log = Log()
    params = federation.run(log).params
    assert log.rows[0]["aborted"] is None and log.rows[0]["clients"] == 6
    assert all(leaf.numel() > 1 and leaf.abs().max() > 1e6 for leaf in params.values())


# --- keys ------------------------------------------------------------------------------------------------------------


def test_keys_of_ssh_keygen(tmp_path):
    if not (program := shutil.which("ssh-keygen")):
        pytest.skip("ssh-keygen is not installed")
    for id in range(3):
        subprocess.run([program, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / str(id))], check=True)
    (tmp_path / "2").unlink()  # of another node
    keys = SigningKeys(tmp_path, [0, 1], 3)
    message = keys.witness(0, "round").sign_keys(b"keys")
    assert keys.witness(1, "round").keys_of(0, message) == b"keys"


def _without_public(folder):
    (folder / "2.pub").unlink()


def _without_private(folder):
    (folder / "0").unlink()


def _exchanged(folder):
    shutil.copy(folder / "1.pub", folder / "0.pub")


def _twice(folder):
    shutil.copy(folder / "1.pub", folder / "2.pub")


def _public_of_another_kind(folder):
    (folder / "1").unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(folder / "1")], check=True, input=b"y")


def _damaged(folder):
    (folder / "1.pub").write_text("ssh-ed25519 AAAA")


def _locked(folder):
    subprocess.run(["ssh-keygen", "-q", "-p", "-N", "secret", "-f", str(folder / "0")], check=True)


def _of_another_kind(folder):
    (folder / "0").unlink()
    subprocess.run(["ssh-keygen", "-q", "-t", "ecdsa", "-N", "", "-f", str(folder / "0")], check=True)
    shutil.copy(folder / "1.pub", folder / "0.pub")


FAULTS = [
    (_without_public, "lacks public keys: 2.pub; a node needs those of all clients"),
    (_without_private, "lacks private keys of this node's clients: 0; make one with: ssh-keygen -t ed25519 -N '' -f "),
    (_twice, "clients 1 and 2 have the same key in '"),
    (_public_of_another_kind, "1.pub' is not an Ed25519 key"),
    (_exchanged, "0.pub' is not the public key of '"),
    (_damaged, "1.pub' is not a public key"),
    (_locked, "0' is not a private key without a passphrase"),
    (_of_another_kind, "0' is not an Ed25519 key"),
]


@pytest.mark.parametrize(("harm", "text"), FAULTS)
def test_keys_that_do_not_serve_are_named(harm, text, tmp_path):
    folder = signing_keys(tmp_path / "keys", 3)
    if harm in (_locked, _of_another_kind, _public_of_another_kind) and not shutil.which("ssh-keygen"):
        pytest.skip("ssh-keygen is not installed")
    harm(folder)
    with pytest.raises(ConfigError, match=re.escape(text)):
        SigningKeys(folder, [0], 3)
