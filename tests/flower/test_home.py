"""What a node of a deployment refuses, and how it keeps the states of its clients."""

import pytest
import torch

from cfl.aggregation.secagg_client import MASK, PUBLIC, SELF
from cfl.core import CheckpointError, tree
from cfl.engines import parts
from cfl.flower import client_states, link, wire
from cfl.flower.client_states import ClientStates
from cfl.flower.link import Link
from tests import toy
from tests.flower.federation import RUN, Clock, Federation, read
from tests.flower.test_deployment import ALL


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    monkeypatch.setattr(link, "time", Clock())


@pytest.fixture
def federation(tmp_path):
    """Three nodes with two clients each, of which node 1 has the clients 1 and 4, after a round of secure sums."""
    found = Federation(toy.config("tasks=1", "rounds=2", *ALL, "secagg=full", method="fedavg"), tmp_path)
    session = found.session()
    session.round(0)
    return found


def ask(federation, kind, clients, round=0, **more):
    """Send node 1 a request; return its answer and its fault."""
    id, more = federation.nodes[1], {"signatures": None, **more} if kind == "unmask" else more
    found = Link(federation.network, 60.0).ask(f"query.{kind}", {id: {"round": round, "clients": clients, **more}})
    return found[id].value, found[id].fault


def last(federation, kind):
    """The last request of a kind to node 1."""
    sent = [one for one in federation.network.sent if (one.node, one.kind) == (federation.nodes[1], kind)]
    return wire.unpack(read(sent[-1].request)), sent[-1]


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["keys", "shares", "unmask"])  # test_signing.py has "confirm"
def test_a_node_refuses_clients_that_are_not_its_own(kind, federation):
    assert ask(federation, kind, {1: 4, 0: 4, 2: 4}) == (None, "node 'n1' has no client 0, 2")


def test_a_node_does_not_train_the_clients_of_others(federation):
    request, sent = last(federation, "train")
    request = {**request, "clients": {0: (0, 0)}}
    request.pop(link.SHARED)
    found = resent(federation, sent, request)
    assert found.fault == "node 'n1' has no client 0"


@pytest.mark.parametrize("told", [{"clients": tuple(range(3000))}, {"owners": 3000}, {"dropped": (1,)}, {"lr": 9.0}])
def test_a_node_refuses_a_round_that_is_described_otherwise(told, federation):
    """With more clients than there are, each would add a smaller share of the noise."""
    request, sent = last(federation, "train")
    request = {**request, "info": {**request["info"], **told}}
    request.pop(link.SHARED)
    fault = f"the server describes the round otherwise than the run has it: {[*told][0]} (task"
    assert resent(federation, sent, request).fault.startswith(fault)


@pytest.mark.parametrize("run", ["", "../../etc", 31 * "a", 32 * "g"])
def test_a_node_refuses_an_id_of_a_run_that_is_none(run, federation, tmp_path):
    request, sent = last(federation, "train")
    request = {**request, "run": run}
    request.pop(link.SHARED)
    assert resent(federation, sent, request).fault.startswith("the id of a run has 32 hex digits")


def test_runs_have_states_of_their_own(federation):
    node, other = federation.node(1), 32 * "b"
    node.states(RUN).store(1, {1: OWN}, {1: 0}, kept=0)
    assert node.states(RUN).load(1, 1).keys() == OWN.keys()
    with pytest.raises(CheckpointError, match="client 1 has no state of round 1"):
        node.states(other).load(1, 1)


def resent(federation, sent, request):
    """Send node 1 a request with the trees that it has."""
    id, names = federation.nodes[1], wire.unpack(read(sent.request))[link.SHARED]

    class Known:
        hashes, record = set(), staticmethod(lambda but: read(sent.request).array_records[link.TREES])

    Known.names = names
    return Link(federation.network, 60.0).ask("train", {id: request}, Known)[id]


@pytest.mark.parametrize(("threshold", "neighbours", "refused"), [(3, 5, False), (2, 5, True), (2, 3, False)])
def test_a_node_refuses_a_threshold_below_the_quorum(threshold, neighbours, refused, federation):
    """secure.quorum=0.5 of a client and its neighbours: 3 of 6, 2 of 4."""
    value, fault = ask(federation, "keys", {1: threshold}, 1)
    assert fault is None and len(value[1]) == 2 * PUBLIC
    others = {id: key for id, key in zip((0, 2, 3, 4, 5), last(federation, "query.shares")[0]["clients"][1].values())}
    near = {id: others[id] for id in [*others][:neighbours]}
    _, fault = ask(federation, "shares", {1: near}, 1)
    text = "the server asks client 1 for a lower threshold than secure.quorum=0.5 gives"
    assert fault == (text if refused else None)


@pytest.mark.parametrize("kind", ["shares", "unmask"])
def test_a_node_refuses_the_keys_of_another_round(kind, federation):
    request, _ = last(federation, f"query.{kind}")
    assert ask(federation, kind, request["clients"], 1) == (None, "node 'n1' has keys of another round")


def test_a_node_reveals_one_secret_of_a_client_and_not_both(federation):
    clients = last(federation, "query.unmask")[0]["clients"]
    assert set(clients[1].values()) == {SELF} and clients[1].keys() == set(range(6))
    again, fault = ask(federation, "unmask", clients)
    assert fault is None and all(len(share) == 16 for share in again[1].values())
    for owner in range(6):
        text = f"client 1 refuses to reveal both secrets of client {owner}"
        assert ask(federation, "unmask", {1: {owner: MASK}}) == (None, text)
    assert ask(federation, "unmask", {4: {4: MASK}})[1] == "client 4 refuses to reveal both secrets of client 4"


def test_a_node_masks_once(federation):
    request, sent = last(federation, "train")
    request.pop(link.SHARED)
    found = resent(federation, sent, request)
    assert (found.fault, found.error) == (
        "client 1 refuses to mask a second vector with the same keys", "RoundAborted"
    )  # fmt: skip


def test_a_node_has_fresh_secrets_in_each_round_and_none_of_them_on_disk(federation, tmp_path):
    first = ask(federation, "keys", {1: 4}, 1)[0][1]
    second = ask(federation, "keys", {1: 4}, 2)[0][1]
    assert first[:PUBLIC] != second[:PUBLIC] and first[PUBLIC:] != second[PUBLIC:]
    context = federation.network.contexts[federation.nodes[1]]
    party = wire.unpack(context.state)["parties"][1]
    on_disk = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert not any(secret in on_disk for secret in (party["cipher"], *party["seeds"].values()))


def test_a_refused_request_for_keys_leaves_the_keys_as_they_are(federation):
    assert ask(federation, "keys", {0: 4}, 1)[1] == "node 'n1' has no client 0"
    assert ask(federation, "unmask", last(federation, "query.unmask")[0]["clients"])[1] is None


def _in_the_clear(request):
    return {**request, "sealed": None}


def _as_a_measurement(request):
    phase = {**request["info"]["phase"], "diagnostic": True}
    return {**request, "sealed": None, "info": {**request["info"], "phase": phase}}


CLEAR = [  # method, rounds before, what the server says of the round
    ("fedavg", 0, _in_the_clear),
    ("fedavg", 0, _as_a_measurement),  # a phase that trains cannot be one
    ("fot", 2, _as_a_measurement),
]


@pytest.mark.parametrize(("method", "rounds", "change"), CLEAR)
def test_under_secure_aggregation_a_node_sends_nothing_in_the_clear(method, rounds, change, tmp_path):
    """After two rounds of training, FOT collects sketches of the clients' data."""
    options = ("tasks=2", "rounds=2", *ALL, "secagg=full")
    federation = Federation(toy.config(*options, method=method), tmp_path)
    session = federation.session()
    for position in range(rounds + 1):
        session.round(position)
    request, sent = last(federation, "train")
    request.pop(link.SHARED)
    found = resent(federation, sent, change(request))
    assert request["round"] == rounds and found.value is None and found.fault


def test_a_node_prints_each_warning_of_its_training_once(tmp_path, monkeypatch, capsys):
    compute = parts.compute
    monkeypatch.setattr(parts, "compute", lambda *given, **more: (
        {**compute(*given, **more), "warnings": [("UserWarning", "the step is large")]}
    ))  # fmt: skip
    Federation(toy.config("tasks=1", "rounds=2", *ALL, method="fedavg"), tmp_path, nodes=1).run()
    assert capsys.readouterr().out.count("warning: the step is large\n") == 1


# --- states ----------------------------------------------------------------------------------------------------------

OWN = {"strategy/memory": torch.tensor([[0, 3]]), "strategy/bases/0": torch.arange(6.0).reshape(3, 2).T}
OTHERS = {"scaffold/c/1.bias": torch.ones(4), "moon/params/1.bias": torch.empty(0)}


def test_a_state_comes_back_as_it_was(tmp_path):
    states = ClientStates(tmp_path)
    states.store(3, {7: {**OTHERS, **OWN}, 2: {}}, {7: 0, 2: 0}, kept=0)
    found = states.load(7, 3)
    assert list(found) == [*OTHERS, *OWN] and tree.equal(found, {**OTHERS, **OWN})
    assert states.load(2, 3) == {} == states.load(2, 0)


KEPT = [  # versions stored in turn, each with the oldest version to which the run may return; those that stay
    ([(1, 0), (2, 0), (3, 1), (4, 2)], [2, 3, 4]),
    ([(1, 0), (5, 4), (9, 8)], [5, 9]),  # the run may return to round 8, when the state was that of round 5
    ([(1, 0), (2, 2)], [1, 2]),  # the server may not have taken the last one
    ([(1, 0), (1, 0)], [1]),  # computed again after the server was killed
    ([(9, 0), (5, 0)], [5]),  # the server was killed, and went back to round 4
]


@pytest.mark.parametrize(("stored", "stay"), KEPT)
def test_versions_stay_as_long_as_the_run_may_return_to_them(stored, stay, tmp_path):
    states = ClientStates(tmp_path)
    current = 0
    for version, kept in stored:
        current = min(current, version - 1)  # the server may have been killed
        states.store(version, {7: {"strategy/n": torch.tensor(version)}, 8: {}}, {7: current, 8: current}, kept)
        current = version
    found = sorted(int(path.stem) for path in (tmp_path / "client-7").iterdir())
    assert found == stay
    assert [states.load(7, version)["strategy/n"].item() for version in stay] == stay


HARM = {
    "gone": (lambda path: path.unlink(), r"client 7 has no state of round 3 \(.*No such file.*\); put the node's fold"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"the state of client 7 is damaged \(.*\)"),
    "changed": (
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\xff"), r"the state of client 7 is damaged \(.*\)"
    ),
    "empty": (lambda path: path.write_bytes(b""), r"the state of client 7 is damaged \(.*\)"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARM)
def test_a_lost_or_damaged_state_is_an_error(name, tmp_path):
    harm, text = HARM[name]
    states = ClientStates(tmp_path)
    states.store(3, {7: OWN}, {7: 0}, kept=0)
    harm(tmp_path / "client-7" / "00000003.safetensors")
    with pytest.raises(CheckpointError, match=text):
        states.load(7, 3)


def test_a_kill_while_a_state_is_written_leaves_the_one_before(tmp_path, monkeypatch):
    states = ClientStates(tmp_path)
    states.store(3, {7: OWN}, {7: 0}, kept=0)

    def dies(*given):
        given[-1].write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("cfl.core.files.replace", dies)
    with pytest.raises(KeyboardInterrupt):
        states.store(4, {7: OTHERS}, {7: 3}, kept=3)
    monkeypatch.undo()
    assert tree.equal(states.load(7, 3), OWN)
    states.store(4, {7: OTHERS}, {7: 3}, kept=3)
    assert tree.equal(states.load(7, 4), OTHERS)


def test_a_reference_names_version_task_and_bytes():
    """16 bytes of two places, 24 of a matrix; 16 of a vector. The end of a task takes the second part away."""
    parts = client_states.parts({**OTHERS, **OWN})
    assert [list(part) for part in parts] == [list(OWN), list(OTHERS)]
    found = client_states.reference(5, 2, [tree.nbytes(part) for part in parts])
    assert client_states.version(found) == (5, 2) and client_states.stored_bytes(found) == 16 + 24 + 16
    ended = {name: leaf for name, leaf in found.items() if name.startswith("strategy/")}
    assert client_states.version(ended) == (5, 2) and client_states.stored_bytes(ended) == 16 + 24
    assert client_states.version({}) == (0, 0) and client_states.stored_bytes({}) == 0
