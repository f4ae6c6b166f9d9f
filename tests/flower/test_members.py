"""Who may join a deployment, who is used, and who is forgotten."""

import math
import shutil
from dataclasses import dataclass

import pytest
from flwr.app import Error, Message

import cfl
from cfl.core.version import __version__
from cfl.flower import link, wire
from tests import toy
from tests.flower.federation import Clock, Federation, Log, alone, answer, app_of, changed, lost, raw, read
from tests.flower.test_deployment import ALL, bare, same

REST = dict.fromkeys((2, 5), "its node is not connected")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """No test waits for a deadline."""
    monkeypatch.setattr(link, "time", Clock())


def config(*options, method="scaffold"):
    """Six clients, all of them in each of three rounds; of three nodes, node 2 has the clients 2 and 5."""
    return toy.config("tasks=1", "rounds=3", *ALL, *options, method=method)


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_a_node_that_joins_late_is_used_from_its_next_round(secagg, tmp_path):
    settings = config(f"secagg={secagg}")
    federation = Federation(settings, tmp_path)
    federation.stop(2)
    log = Log({2: lambda: federation.start(2)})
    found = federation.run(log), log
    gone = dict.fromkeys((2, 5), "keys" if secagg == "full" else "upload")
    same(alone(bare(settings), lost={0: gone, 1: gone}), found, settings, 1e-6)
    assert [row.get("missing") for row in log.rows] == [REST, REST, None]
    assert federation.said == [f"node 'n{n}' (clients {n}, {n + 3}) has joined" for n in (1, 0, 2)]  # in order of ids


def test_a_run_without_nodes_aborts_its_rounds(tmp_path):
    federation = Federation(config(), tmp_path, nodes=0)
    log = Log()
    result = federation.run(log)
    start = federation.session().state.server["params"]
    assert all(row["aborted"] and len(row["missing"]) == 6 for row in log.rows)
    assert all(leaf.equal(start[name]) for name, leaf in result.params.items())


# --- refused ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Other(cfl.Strategy):
    """FedAvg with code of another package."""

    def loss(self, logits, ctx):
        return super().loss(logits, ctx)


def _says(**parts):
    """A node that says something else when it joins."""
    return lambda federation: {}, changed(lambda value: {**value, **parts})


def _is(**changes):
    """A node that is made of something else."""
    return lambda federation: {name: make() for name, make in changes.items()}, None


REFUSED = {
    "another version": (
        _says(version="0.0.1"), f"it has cfl 0.0.1, the server {__version__}; install the same version"
    ),
    "other options": (
        _is(options=lambda: "another hash"),
        "it resolves the configuration to other options; give it the server's config.yaml",
    ),
    "other data": (
        _is(stream=lambda: toy.stream(1, test=41)),
        "it differs from the server in the data of task 'task 0'; install the same packages and data",
    ),
    "other code": (
        _is(members=lambda: {"strategy": Other(), "scaffold": cfl.core.plugins.local.get("scaffold")()}),
        "it differs from the server in the list of methods; install the same packages and data",
    ),
    "more parts": (
        _says(parts={"the code of method 'x'": "1"}),
        "it differs from the server in the data of task 'task 0'; install the same packages and data",
    ),
    "a client beyond the population": (_is(clients=lambda: (2, 6)), "its clients are 2, 6, of 0 to 5; "),
    "a client below": (_is(clients=lambda: (-1, 2)), "its clients are -1, 2, of 0 to 5; "),
    "no clients": (_is(clients=lambda: ()), "its clients are none, of 0 to 5; "),
    "nothing": (
        (lambda federation: {}, lambda message, deliver: answer(message, None)), "its answer is not one of cfl's ("
    ),
    "half an answer": (
        (lambda federation: {}, changed(lambda value: {"clients": value["clients"]})),
        "its answer is not one of cfl's (KeyError: 'samples')",
    ),
    "clients that are no numbers": (_says(clients=["a"]), "its answer is not one of cfl's (ValueError: "),
    "more samples than a sum can hold": (
        _says(samples=[2**60]), "its answer is not one of cfl's (ValueError: its numbers of samples are too large)"
    ),
    "a client of infinity": (_says(clients=[math.inf]), "its answer is not one of cfl's (OverflowError: "),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_node_that_does_not_fit_is_refused_by_name_and_the_run_goes_on(name, tmp_path):
    """The node would have the clients 2 and 5."""
    (made, says), reason = REFUSED[name]
    settings = config()
    federation = Federation(settings, tmp_path)
    federation.stop(2)
    id = federation.start(2, **made(federation))

    def fault(node, message, deliver):
        return says(message, deliver) if says and node == id else deliver()

    federation.network.fault, log = fault, Log()
    found = federation.run(log), log
    gone = dict.fromkeys((2, 5), "upload")
    same(alone(settings, lost=dict.fromkeys(range(3), gone)), found, settings, 1e-6)
    assert all(row["missing"] == REST for row in log.rows)
    told = [text for text in federation.said if " may not join: " in text]
    assert len(told) == 1 and told[0].startswith(f"node {id} may not join: {reason}")
    assert [one.kind for one in federation.network.sent if one.node == id] == ["query.join"]  # and is asked only once


MUTE = {
    "late": (lost, "it has not answered so far"),
    "garbage": (lambda message, deliver: raw(message, data=b"x"), "the tensors of a message are damaged: "),
    "crashed": (lambda message, deliver: Message(Error(0, "it crashed"), reply_to=message), "it crashed"),
}


@pytest.mark.parametrize("name", MUTE)
def test_a_node_that_cannot_say_what_it_is_made_of_is_named_and_the_run_goes_on(name, tmp_path):
    act, reason = MUTE[name]
    federation = Federation(config(), tmp_path)
    id = federation.nodes[2]
    federation.network.fault = lambda node, message, deliver: act(message, deliver) if node == id else deliver()
    log = Log()
    federation.run(log)
    assert any(text.startswith(f"node {id} has not joined yet: {reason}") for text in federation.said)
    assert all(row["missing"] == REST and row["aborted"] is None for row in log.rows)


def test_why_a_node_has_not_joined_yet_is_told_again_only_if_it_has_changed(tmp_path):
    federation = Federation(config(), tmp_path)
    id, reasons = federation.nodes[2], ["away", "away", "broken"]
    federation.network.fault = lambda node, message, deliver: (
        Message(Error(0, reasons.pop(0)), reply_to=message) if node == id else deliver()
    )
    federation.run()
    assert reasons == []
    told = [text for text in federation.said if "yet" in text]
    assert told == [f"node {id} has not joined yet: {why}" for why in ("away", "broken")]


ESCAPE, BLANK = "\x1b]0;owned\x07\n" + 500 * "x", " ]0;owned  " + 500 * "x"


def test_a_name_of_a_node_is_shown_without_control_characters_and_cut(tmp_path):
    federation = Federation(config(), tmp_path)
    federation.stop(2)
    federation.start(2, name=ESCAPE)
    log = Log({1: lambda: federation.stop(2)})
    federation.run(log)
    assert f"node '{BLANK[:100]} ...' (clients 2, 5) has joined" in federation.said


@pytest.mark.parametrize("how", ["its error", "its exception", "a hash"])
def test_a_reason_of_a_node_is_shown_without_control_characters_and_cut(how, tmp_path):
    federation = Federation(config(), tmp_path)
    id = federation.nodes[2]

    def act(message, deliver):
        if how == "its error":
            return Message(Error(0, ESCAPE), reply_to=message)
        if how == "a hash":
            value = wire.unpack(deliver().content)
            return answer(message, {**value, "parts": {**value["parts"], ESCAPE: "x"}})
        return Message(link.fault(RuntimeError(ESCAPE)), reply_to=message)

    federation.network.fault = lambda node, message, deliver: act(message, deliver) if node == id else deliver()
    federation.run()
    (text,) = [text for text in federation.said if f"node {id} " in text]
    assert text.isprintable() and "]0;owned" in text and text.endswith("x ...") and len(text) < 360


ALONE = ("tasks=2", "rounds=1", "partition.clients=3", "cohort=3")  # a client a node
OWN = {"samples": [5, 5], "parts": {}}  # what a node with data of its own says


def test_data_of_a_nodes_own_and_parts_of_the_benchmark_do_not_mix(tmp_path):
    federation = Federation(config(*ALONE), tmp_path)
    second = federation.nodes[1]
    act = changed(lambda value: {**value, **OWN})
    federation.network.fault = lambda node, message, deliver: act(message, deliver) if node == second else deliver()
    federation.run()
    assert f"node {second} may not join: some nodes have data of their own, and others parts of the benchmark; " in (
        " ".join(federation.said)
    )


def test_a_node_with_data_of_its_own_may_not_join_a_private_run(tmp_path):
    private = ("dp.noise_multiplier=1", "agg.weights=uniform", "dp.amplify=false", "dp.noise_seed=system")
    federation = Federation(config(*ALONE, *private, method="fedavg"), tmp_path)
    act = changed(lambda value: {**value, **OWN})
    federation.network.fault = lambda node, message, deliver: (
        act(message, deliver) if message.metadata.message_type == "query.join" else deliver()
    )
    log = Log()
    federation.run(log)
    assert all(row["aborted"] for row in log.rows)
    assert federation.said[0].endswith("epsilon is computed for the parts of the benchmark; leave out --data")


def test_a_node_that_starts_again_with_other_clients_under_its_id_is_asked_to_join_again(tmp_path):
    """Flower gives a node with a registered key the same id again."""
    federation = Federation(config(), tmp_path)
    id = federation.nodes[2]
    log = Log({1: lambda: federation.network.add(id, app_of(federation.node(2, clients=(2,))))})
    federation.run(log)
    assert [row.get("missing") for row in log.rows] == [None, {5: REST[5]}, {5: REST[5]}]
    assert federation.said[-1] == "node 'n2' (client 2) has joined"


def test_a_refused_node_that_starts_again_under_its_id_is_asked_to_join_again(tmp_path):
    """Node 2 comes with wrong options first, and is put right within a round: the server never sees it absent."""
    settings = config()
    federation = Federation(settings, tmp_path)
    id = federation.nodes[2]
    federation.network.add(id, app_of(federation.node(2, options="others")))
    log = Log({1: lambda: federation.network.add(id, app_of(federation.node(2)))})
    federation.run(log)
    assert [row.get("missing") for row in log.rows] == [REST, None, None]
    assert federation.said[-1] == "node 'n2' (clients 2, 5) has joined"


def test_of_two_nodes_with_one_client_the_first_keeps_it(tmp_path):
    settings = config()
    federation = Federation(settings, tmp_path)
    log = Log({1: lambda: federation.start(3, clients=(2, 3))})
    same(alone(settings), (federation.run(log), log), settings, 1e-6)
    assert federation.said[-1] == (
        f"node {federation.nodes[3]} may not join: node 'n2' (clients 2, 5) has client 2 already; "
        "give each node clients of its own"
    )


def test_a_node_that_was_late_once_is_asked_again(tmp_path):
    federation = Federation(config(), tmp_path)
    late, id = [lost], federation.nodes[2]
    federation.network.fault = lambda node, message, deliver: (
        late.pop()(message, deliver) if node == id and late else deliver()
    )
    log = Log({1: lambda: link.time.sleep(600)})  # the deadline
    federation.run(log)
    assert [row.get("missing") for row in log.rows] == [REST, None, None]


def test_a_node_that_never_answers_costs_no_round_more_than_a_moment(tmp_path):
    """The first round waits for five seconds, and the next two look once. The node joins when it answers."""
    federation, replies, times = Federation(config(), tmp_path), [], []
    id = federation.nodes[2]
    federation.network.fault = lambda node, message, deliver: (
        replies.append(deliver()) if (node, message.metadata.message_type) == (id, "query.join") else deliver()
    )

    def answers():
        times.append(link.time.now)
        federation.network.arrives(replies[0])

    log = Log({1: lambda: times.append(link.time.now), 2: answers})
    federation.run(log)
    assert times[0] == pytest.approx(5.0, abs=0.05) and times[1] == times[0] and len(replies) == 1
    assert [row.get("missing") for row in log.rows] == [REST, REST, None]
    assert [text for text in federation.said if "yet" in text] == [
        f"node {id} has not joined yet: it has not answered so far"
    ]


def test_a_node_may_join_when_the_other_one_with_its_clients_has_left(tmp_path):
    """Node 2 has lost its folder and its token, and Flower still counts the old process for a round."""
    federation = Federation(config(method="fedavg"), tmp_path)

    def restarts():
        shutil.rmtree(tmp_path / "node 2")
        restarted(federation)

    log = Log({1: restarts, 2: federation.network.ghosts.clear})
    federation.run(log)
    assert log.rows[1]["missing"].keys() == {2, 5} and "missing" not in log.rows[2]


def test_when_a_node_leaves_another_may_take_its_clients(tmp_path):
    """State stays in the folder, which the other node has too."""
    settings = config()
    federation = Federation(settings, tmp_path)

    def moves():
        federation.stop(2)
        federation.start(2, name="other")

    log = Log({1: moves})
    same(alone(settings), (federation.run(log), log), settings, 1e-6)
    assert federation.said[-2:] == ["node 'n2' (clients 2, 5) has left", "node 'other' (clients 2, 5) has joined"]


# --- restarts that Flower has not noticed ----------------------------------------------------------------------------


def restarted(federation):
    """Start node 2 again, while Flower still counts the old process."""
    federation.network.ghosts.append(federation.nodes[2])
    federation.stop(2)
    federation.start(2)


def test_a_restarted_node_takes_the_place_of_the_old_one(tmp_path):
    settings = config()
    federation = Federation(settings, tmp_path)
    log = Log({1: lambda: restarted(federation)})
    same(alone(settings), (federation.run(log), log), settings, 1e-6)
    assert log.warnings == [] and not any("already" in text for text in federation.said)


def test_the_old_process_of_a_restarted_node_is_not_asked_again(tmp_path):
    federation = Federation(config(), tmp_path)
    old = federation.nodes[2]
    federation.run(Log({1: lambda: restarted(federation)}))
    assert [one.kind for one in federation.network.sent if one.node == old] == ["query.join", "train"]


def test_a_node_that_another_has_replaced_is_used_again_when_that_one_leaves(tmp_path):
    """Node 2 is started twice by mistake, and goes on when the second process ends."""
    settings = config()
    federation = Federation(settings, tmp_path)
    log = Log({1: lambda: federation.start(2), 2: lambda: federation.stop(2)})
    same(alone(settings), (federation.run(log), log), settings, 1e-6)
    assert not any("missing" in row for row in log.rows)
    named = "node 'n2' (clients 2, 5)"
    assert federation.said[-3:] == [f"{named} has joined", f"{named} has left", f"{named} has joined"]


def test_a_node_with_a_copy_of_another_nodes_folder_is_refused(tmp_path):
    federation = Federation(config(), tmp_path)
    for number in (1, 2):
        (tmp_path / f"node {number}").mkdir()
        (tmp_path / f"node {number}" / "token").write_text("0" * 32)
    federation.run()
    assert sum(" may not join: " in text for text in federation.said) == 1


def test_a_token_stays_with_the_folder(tmp_path):
    federation = Federation(config(), tmp_path)
    federation.run()
    token = (tmp_path / "node 2" / "token").read_text()
    federation.stop(2)
    federation.start(2)
    federation.run()
    joins = [one for one in federation.network.sent if one.kind == "query.join"]
    tokens = [wire.unpack(read(one.reply))["token"] for one in joins]
    assert len(token) == 32 and len(set(tokens)) == 3  # of three nodes
    assert [tokens.count(token), len(tokens)] == [2, 6]  # two runs
