"""Faults of nodes: each is named, its clients are left out, and the round goes on above the quorum."""

import json
import math
import pickle
import re
import warnings

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, RecordDict

from cfl.aggregation.plain import UploadSum
from cfl.flower import link
from cfl.flower.deployment import MemberPopulation
from tests import toy
from tests.flower.federation import (
    Clock,
    Federation,
    Log,
    alone,
    answer,
    asked,
    at,
    changed,
    lost,
    raw,
    unavailable,
    unlike,
)
from tests.flower.test_deployment import ALL, bare, left, same

STAGES = {"query.keys": "keys", "query.shares": "shares", "train": "upload", "query.unmask": "unmask"}
LATE = "it did not answer within 600 seconds"
NAMED = r"node 'n1' \(clients 1, 4\): "


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """No test waits for a deadline."""
    monkeypatch.setattr(link, "time", Clock())


def config(*options, method="scaffold"):
    """Six clients, all of them in each of three rounds; of three nodes, node 1 has the clients 1 and 4."""
    return toy.config("tasks=1", "rounds=3", *ALL, *options, method=method)


def expect(settings, federation, gone, text, output):
    """Run; node 1 is missing, for a reason that matches `text`, and all figures are those without its clients.

    gone: for each round, the stage at which it is lost.
    """
    log = Log()
    found = federation.run(log, output), log
    stages = {round: {1: stage, 4: stage} for round, stage in gone.items()}
    same(alone(bare(settings), lost=stages), found, settings, 1e-6)
    for round, row in enumerate(left(output)["rows"]):
        why = row.get("missing", {})
        assert [*why] == (["1", "4"] if round in gone else [])
        assert all(re.fullmatch(text, each) for each in why.values()), why
    told = [text for text in log.warnings if " is missing (" in text]
    assert len(told) == 2 * len(gone) and told[0].startswith("client 1 is missing (task 0, phase train, round ")


# --- answers to `train` ----------------------------------------------------------------------------------------------


def _sums(value):
    return value["part"]["_sums"]["strategy"]


def _fill(number):
    def change(value):
        _sums(value)["1.bias"][0] = number

    return change


def _reshape(value):
    """Sums of another shape than the outlines say."""
    _sums(value)["1.bias"] = torch.zeros(7)


def _integers(value):
    """Sums of integers, which fit their outlines."""
    for trees in (value["part"]["_sums"], value["part"]["_outlines"]):
        trees["strategy"]["1.bias"] = trees["strategy"]["1.bias"].long()


def _complex(value):
    """Complex sums, which fit their outlines."""
    for trees in (value["part"]["_sums"], value["part"]["_outlines"]):
        trees["strategy"]["1.bias"] = trees["strategy"]["1.bias"].to(torch.complex64)


def _weigh(weight):
    def change(value):
        for trees in value["part"]["_stacks"].values():
            trees["weights"][""] = torch.tensor(weight, dtype=torch.float64)

    return change


def _other_model(value):
    """Sums of another model, which fit their outlines."""
    for trees in (value["part"]["_sums"], value["part"]["_outlines"]):
        trees["strategy"]["1.bias"] = torch.zeros(7)


def _other_task(value):
    """Sums of another task's head."""
    for trees in (value["part"]["_sums"], value["part"]["_outlines"]):
        trees["strategy"] = {name.replace("3.", "heads.7."): leaf for name, leaf in trees["strategy"].items()}


def _mixed_names(value):
    """Sums of owners whose names cannot be sorted."""
    for trees in (value["part"]["_sums"], value["part"]["_outlines"]):
        trees |= {0: {"a": torch.zeros(1)}, "x": {"a": torch.zeros(1)}}


def _set(*path, to):
    def change(value):
        for name in path[:-1]:
            value = value[name]
        value[path[-1]] = to

    return change


def _drop(name):
    return lambda value: {key: item for key, item in value.items() if key != name}


ANSWERS = {
    "it answers never, or too late": (lost, LATE),
    "it is lost to Flower": (lambda message, deliver: unavailable(message), r"Error: Node Unavailable.*"),
    "its process crashed": (lambda message, deliver: Message(Error(0, "it crashed"), reply_to=message), "it crashed"),
    "garbage": (lambda message, deliver: raw(message, data=b"garbage"), r"the tensors of a message are damaged: .*"),
    "half a text": (lambda message, deliver: raw(message, '["dict",['), r"a message is not one of cfl's, or is .*"),
    "a pickle": (
        lambda message, deliver: raw(message, data=pickle.dumps({}), stype="pickle"),
        "tensors must come as safetensors, not pickle",
    ),
    "no records": (lambda message, deliver: Message(RecordDict(), reply_to=message), "a message is not one of .*"),
    "None": (lambda message, deliver: answer(message, None), "its answer is .*"),
    "no losses": (changed(_drop("losses")), "its answer is .*"),
    "NaN": (changed(_fill(math.nan)), "its sum of 'strategy' has NaN or infinity"),
    "infinity": (changed(_fill(math.inf)), "its sum of 'strategy' has NaN or infinity"),
    "a weight of infinity": (changed(_set("part", "_weight", to=math.inf)), "its weight is not a number of samples"),
    "a negative weight": (changed(_set("part", "_weight", to=-1.0)), "its weight is not a number of samples"),
    "a weight of zero": (changed(_set("part", "_weight", to=0.0)), "its weight is not a number of samples"),
    "a loss of NaN": (changed(_set("losses", 1, to=torch.tensor(math.nan))), "its loss.*"),
    "a loss that is no number": (changed(_set("losses", 1, to=torch.ones(2))), "its losses are not numbers"),
    "a complex loss": (changed(_set("losses", 1, to=torch.tensor(1j))), "its losses are not numbers"),
    "a loss beyond float32": (
        changed(_set("losses", 1, to=torch.tensor(1.7e308, dtype=torch.float64))), "its losses are not finite in .*"
    ),
    "complex sums": (changed(_complex), "its sum of 'strategy' is not a tree of real numbers"),
    "a client twice": (changed(_set("part", "zeroed", to=[1, 1])), "it answers twice for a client"),
    "another shape": (changed(_reshape), "its sum of 'strategy' has other names, shapes or types than it says"),
    "another model": (changed(_other_model), r"its 'strategy/1.bias' has shape \(7,\) and type torch.float32, .*"),
    "integers": (changed(_integers), r"its 'strategy/1.bias' has shape \(.*\) and type torch.int64, the .*"),
    "other parts": (changed(_set("part", "_more", to=1)), "its sum has other parts than those of the run"),
    "names of two kinds": (changed(_mixed_names), "its sum has uploads of 0, which the run has not"),
    "another task": (changed(_other_task), r"its 'strategy/.*' of shape .* is not what other nodes sent"),
    "for another client": (
        changed(_set("done", to=[0, 1, 4])), "it answers for clients that it was not asked for"
    ),
    "states of another client": (
        changed(_set("sizes", 0, to=[1, 1])), "it answers for clients that it was not asked for"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", toy.quick(*[*ANSWERS][::3], of=ANSWERS))
def test_a_node_that_answers_nonsense_is_left_out_of_the_round(name, tmp_path):
    act, text = ANSWERS[name]
    settings = config()
    federation = Federation(settings, tmp_path)
    federation.network.fault = at("train", [1], [federation.nodes[1]], act)
    expect(settings, federation, {1: "upload"}, NAMED + text, tmp_path / "output")


def _without(*ids):
    def change(value):
        for id in ids:
            del value["part"]["_stacks"][id]

    return change


_WEIGHTS = "its clients' weights are not those of agg.weights"
_STACKS = "its stacks are not those of the clients that it has computed"
STACKS = {
    "a negative weight": (_weigh(-2.0), _WEIGHTS),
    "a large weight": (_weigh(1e12), _WEIGHTS),
    "a client without a stack": (_without(4), _STACKS),
    "no stacks": (_without(1, 4), _STACKS),
}


@pytest.mark.parametrize("name", STACKS)
def test_a_node_with_impossible_stacks_is_left_out_of_the_round(name, tmp_path):
    change, text = STACKS[name]
    settings = config("agg.weights=uniform", method="fedavg+norm_bound")
    federation = Federation(settings, tmp_path)
    federation.network.fault = at("train", [1], [federation.nodes[1]], changed(change))
    expect(settings, federation, {1: "upload"}, NAMED + text, tmp_path / "output")


def _huge(value):
    """Sums of 10^12 entries in a few bytes: whoever adds them up is busy for an hour."""
    for trees in (value["part"]["_sums"], value["part"]["_outlines"]):
        trees["work"] = {"gram/1": torch.zeros(()).expand(10**12)}


def _huge_vector(value):
    value["part"]["_outlines"]["strategy"]["1.weight"] = torch.zeros(()).expand(10**12)
    value["part"]["_vector"] = torch.zeros((), dtype=torch.float64).expand(10**12)


def _cut(value):
    """Vectors that lack an entry."""
    value["part"]["_integers"] = {id: vector[1:] for id, vector in value["part"]["_integers"].items()}


def _floats(value):
    value["part"]["_integers"] = {id: vector.astype("<f8") for id, vector in value["part"]["_integers"].items()}


def _without_sums(value):
    """No sums of what it says that it has."""
    value["part"]["_sums"] = {}


UNIFORM, SECURE = "agg.weights=uniform", "secagg=full"
NOISY = ("dp.noise_multiplier=1", "dp.accountant=rdp", "dp.amplify=false")
MAJORITY = {  # options, what node 0 sends, and why it is left out
    "another model": ((), _other_model, "its 'strategy/1.bias' has shape (7,) and type torch.float32, the model"),
    "unknown owners": ((), _mixed_names, "its sum has uploads of 0, which the run has not"),
    "no sums": ((), _without_sums, "its sum has other owners than it says"),
    "a large weight": ((UNIFORM,), _set("part", "_weight", to=1e9), "its weight is 1e+09, not the 4 of its clients"),
    "a large count": (
        (UNIFORM, SECURE), _set("part", "_count", to=10**9), "it counts 1000000000 clients in its sum of 4"
    ),
    "a weight beside vectors": ((SECURE,), _set("part", "_weight", to=9.0), "it counts 4 clients in its sum of 4"),
    "float vectors": ((SECURE,), _floats, "its integers are not 111 of type uint64 for each client"),
    "short vectors": ((SECURE,), _cut, "its integers are not 111 of type uint64 for each client"),
    "huge sums": ((), _huge, "its sum of 'work' has one number for 1000000000000 entries, more than the model has"),
    "a huge vector": ((UNIFORM, *NOISY), _huge_vector, "its 'strategy/1.weight' has shape (1000000000000,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", MAJORITY)
def test_a_node_with_most_clients_does_not_decide_what_is_right(name, tmp_path):
    """Node 0 has four of six clients. With its clients gone, two of six are fewer than the quorum, or change little.

    The 111 entries under secure sums are the weight and the 8 * 10 + 10 + 10 * 2 = 110 of the model.
    """
    options, change, text = MAJORITY[name]
    quorum = ("flower.quorum=0.3", "secure.quorum=0.8")
    federation = Federation(config(*quorum, *options, method="fedavg"), tmp_path, nodes=2)
    for number, clients in enumerate([(0, 1, 2, 3), (4, 5)]):
        federation.stop(number)
        federation.start(number, clients=clients)
    federation.network.fault = at("train", [1], [federation.nodes[0]], changed(change))
    log = Log()
    federation.run(log)
    assert log.rows[1]["missing"].keys() == {0, 1, 2, 3}
    assert all(text in why for why in log.rows[1]["missing"].values()), log.rows[1]["missing"]
    assert log.rows[1]["clients"] == (0 if SECURE in options else 2) and log.rows[2]["clients"] == 6


def test_a_sum_that_cannot_be_added_aborts_its_round(tmp_path, monkeypatch):
    """Whatever the checks of an answer have missed."""
    federation, log = Federation(config(method="fedavg"), tmp_path), Log()
    merge = UploadSum.merge

    def merges(total, part):
        if part["_lowest"] == 1 and total.info.round == 1:
            raise KeyError("3.bias")
        merge(total, part)

    monkeypatch.setattr(UploadSum, "merge", merges)
    federation.run(log)
    text = "the sum of node 'n1' (clients 1, 4) cannot be added (KeyError('3.bias')); ask its owner for what it runs"
    assert [row["aborted"] for row in log.rows] == [None, text, None]


EVEN = ("partition.clients=4", "cohort=4")


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize("round", [0, 1])
def test_of_two_equal_nodes_the_one_with_the_shapes_of_the_round_before_counts(round, broken, tmp_path):
    """In the first round nobody knows the shapes, so it changes nothing."""
    federation, log = Federation(config(*EVEN, method="fedavg"), tmp_path, nodes=2), Log()
    federation.network.fault = at("train", [round], [federation.nodes[broken]], changed(_other_task))
    federation.run(log)
    if round == 0:
        assert log.rows[0]["aborted"].startswith("equal numbers of clients sent uploads of different shapes")
    else:
        assert log.rows[1]["missing"].keys() == {broken, broken + 2}
    assert log.rows[2]["aborted"] is None and "missing" not in log.rows[2]


def test_a_round_in_which_all_updates_that_arrive_are_not_finite_changes_nothing(tmp_path):
    federation, log = Federation(config("on_bad_update=exclude", method="fedavg"), tmp_path), Log()
    for task in federation.stream.tasks:
        task.train.pool.images[task.train.index] = math.nan
    federation.run(log)
    assert all(row["aborted"].startswith("all updates that arrived in time have NaN") for row in log.rows)


def test_a_node_whose_update_is_not_finite_is_left_out_with_its_reason(tmp_path):
    """With on_bad_update=raise, this is an error on the node."""
    settings = config(method="fedavg")
    federation = Federation(settings, tmp_path)

    def explode(message, deliver):
        """The node's samples are not finite in this round."""
        samples = federation.stream.tasks[0].train.pool.images
        kept = samples.clone()
        samples.fill_(math.nan)
        try:
            return deliver()
        finally:
            samples.copy_(kept)

    federation.network.fault = at("train", [1], [federation.nodes[1]], explode)
    text = r"client 1 sent an update with NaN or infinity \(task 0, phase train, round 1\): .*"
    expect(settings, federation, {1: "upload"}, NAMED + text, tmp_path / "output")


# --- stages of secure aggregation ------------------------------------------------------------------------------------

ACTS = {
    "late": (lost, LATE),
    "crashed": (lambda message, deliver: Message(Error(0, "it crashed"), reply_to=message), "it crashed"),
    "damaged": (lambda message, deliver: raw(message, data=b"garbage"), r"the tensors of a message are damaged: .*"),
}


@pytest.mark.parametrize("act", toy.quick("late", of=ACTS))
@pytest.mark.parametrize("kind", STAGES)
def test_a_node_lost_at_any_stage_is_left_out(kind, act, tmp_path):
    settings, (act, text) = config("secagg=full"), ACTS[act]
    federation = Federation(settings, tmp_path)
    federation.network.fault = at(kind, [1], [federation.nodes[1]], act)
    expect(settings, federation, {1: STAGES[kind]}, NAMED + text, tmp_path / "output")


@pytest.mark.parametrize("act", toy.quick("late", of=ACTS))
def test_a_node_lost_while_clients_sign_the_list_has_uploaded(act, tmp_path):
    """Four of six clients sign, so the uploads of the others count, as if they had dropped out at the next stage."""
    settings, (act, text) = config("secagg=full", "secure.consistency=true", "secure.quorum=0.66"), ACTS[act]
    federation, log = Federation(settings, tmp_path), Log()
    federation.network.fault = at("query.confirm", [1], [federation.nodes[1]], act)
    found, plain = federation.run(log), alone(bare(settings), lost={1: dict.fromkeys((1, 4), "unmask")})[0]
    assert all(torch.equal(leaf, plain.params[name]) for name, leaf in found.params.items())
    assert [[*row.get("missing", {})] for row in log.rows] == [[], [1, 4], []]
    assert all(re.fullmatch(NAMED + text, why) for why in log.rows[1]["missing"].values())
    assert [row["aborted"] for row in log.rows] == [None] * 3


@pytest.mark.parametrize("kind", STAGES)
def test_a_node_that_goes_at_any_stage_is_missing_from_then_on(kind, tmp_path):
    settings = config("secagg=full")
    federation = Federation(settings, tmp_path)

    def goes(message, deliver):
        federation.stop(1)
        return deliver()

    federation.network.fault = at(kind, [1], [federation.nodes[1]], goes)
    expect(settings, federation, {1: STAGES[kind], 2: "keys"}, f"{NAMED}.*|its node is not connected",
           tmp_path / "output")  # fmt: skip
    assert federation.said[-1] == "node 'n1' (clients 1, 4) has left"


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_a_node_that_is_gone_before_a_round_is_not_asked(secagg, tmp_path):
    settings = config(f"secagg={secagg}")
    federation = Federation(settings, tmp_path)
    log = Log({1: lambda: federation.stop(1)})
    found = federation.run(log), log
    stage = "keys" if secagg == "full" else "upload"
    gone = dict.fromkeys((1, 4), stage)
    same(alone(bare(settings), lost={1: gone, 2: gone}), found, settings, 1e-6)
    assert [row.get("missing") for row in log.rows] == [None, *2 * [dict.fromkeys((1, 4), "its node is not connected")]]
    assert federation.said[-1] == "node 'n1' (clients 1, 4) has left"


@pytest.mark.parametrize("kind", [*STAGES][:-1])
def test_a_node_that_restarts_between_stages_has_lost_its_keys(kind, tmp_path):
    """Its secrets are in memory alone. The new process answers under the old id."""
    settings = config("secagg=full")
    federation = Federation(settings, tmp_path)
    after = [*STAGES][[*STAGES].index(kind) + 1]

    def restarts(message, deliver):
        federation.start(1)
        id = federation.nodes[1]
        apps = federation.network.apps
        apps[message.metadata.dst_node_id] = apps.pop(id)
        federation.network.contexts[message.metadata.dst_node_id] = federation.network.contexts[id]
        return deliver()

    federation.network.fault = at(after, [1], [federation.nodes[1]], restarts)
    text = NAMED + "node 'n1' has lost its keys of this round, for example by a restart"
    expect(settings, federation, {1: STAGES[after]}, text, tmp_path / "output")


# --- quorums ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", STAGES)
def test_too_few_clients_at_any_stage_change_nothing(kind, tmp_path):
    """secure.quorum=0.5 of six clients: the two of node 0 are too few. The run goes on with the next round."""
    settings = config("secagg=full")
    federation = Federation(settings, tmp_path)
    federation.network.fault = at(kind, [1], [federation.nodes[1], federation.nodes[2]], lost)
    log = Log()
    found = federation.run(log), log
    same(alone(bare(settings), lost={1: dict.fromkeys((1, 2, 4, 5), STAGES[kind])}), found, settings)
    text = f"2 of 6 clients are left after stage {STAGES[kind]}, 3 are needed; lower secure.quorum or raise cohort"
    assert [row["aborted"] for row in log.rows] == [None, text, None]
    assert log.rows[1]["missing"].keys() == {1, 2, 4, 5} and log.rows[1]["clients"] == 0


QUORUMS = [  # quorum, nodes that are lost of three with two clients each, number of clients that are needed
    (0.5, 1, None), (0.5, 2, 3), (0.66, 1, None), (0.67, 1, 5), (1.0, 1, 6), (0.33, 2, None), (0.1, 3, 1),
]  # fmt: skip


@pytest.mark.parametrize(("quorum", "nodes", "needed"), QUORUMS)
def test_without_secure_sums_flower_quorum_decides(quorum, nodes, needed, tmp_path):
    settings = config(f"flower.quorum={quorum}")
    federation = Federation(settings, tmp_path)
    gone = [*federation.nodes.values()][3 - nodes :]
    federation.network.fault = at("train", [1], gone, lost)
    log = Log()
    result = federation.run(log)
    clients = [id for id in range(6) if needed is not None or id % 3 >= 3 - nodes]  # a round of none is aborted
    expected, _ = alone(settings, lost={1: dict.fromkeys(clients, "upload")})
    assert list(unlike(expected.params, result.params, 1e-6)) == []
    remedy = "lower flower.quorum, or raise flower.deadline"
    text = needed and f"{6 - 2 * nodes} of 6 clients answered, {needed} are needed; {remedy}"
    assert [row["aborted"] for row in log.rows] == [None, text, None]
    assert log.rows[2]["clients"] == 6 and "missing" not in log.rows[2]


def test_a_quorum_is_a_fraction_and_not_its_nearest_float(tmp_path):
    settings = toy.config(
        "tasks=1", "rounds=1", "cohort=25", "partition.clients=25", "local.batch_size=8", "flower.quorum=0.56"
    )
    federation = Federation(settings, tmp_path, 1, toy.stream(1, train=200))
    federation.stop(0)
    federation.start(0, clients=tuple(range(14)))
    log = Log()
    federation.run(log)
    assert log.rows[0]["clients"] == 14


# --- any answer ------------------------------------------------------------------------------------------------------

JUNK = [
    None, -1, 10**30, math.nan, math.inf, "x", [], torch.tensor(math.nan), torch.ones(3, 3), np.arange(3, dtype="<u8")
]  # fmt: skip
PRIVATE = ("dp.noise_multiplier=1", "dp.accountant=rdp", "agg.weights=uniform", "dp.amplify=false")
ANY = {  # options, kind of the request, and how many of the cases are tried: one in so many
    "join": ((), "query.join", 3),
    "join, own data": ((), "query.join", 1),
    "train": ((), "train", 7),
    "train, private": (PRIVATE, "train", 7),
    "keys": (("secagg=full",), "query.keys", 1),
    "shares": (("secagg=full",), "query.shares", 7),
    "train, secagg": (("secagg=full",), "train", 19),
    "unmask": (("secagg=full",), "query.unmask", 7),
    "confirm": (("secagg=full", "secure.consistency=true", "secure.quorum=0.9"), "query.confirm", 1),
}


def places(value, path=()):
    """Paths to all parts of a value."""
    yield path
    for name in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list | tuple) else ():
        yield from places(value[name], (*path, name))


def replaced(value, path, new):
    if not path:
        return new
    if isinstance(value, dict):
        return {name: replaced(item, path[1:], new) if name == path[0] else item for name, item in value.items()}
    return type(value)(replaced(item, path[1:], new) if n == path[0] else item for n, item in enumerate(value))


@pytest.mark.parametrize("name", toy.quick("train", "unmask", of=ANY))
def test_no_answer_of_a_node_ends_the_run(name, tmp_path):
    """Each part of an answer of node 1 is replaced. Without masks, the nodes compute their answers only once."""
    options, kind, every = ANY[name]
    settings = toy.config("tasks=1", "rounds=1", "cohort=3", "partition.clients=3", *options, method="scaffold")
    if name == "train, private":
        settings = settings.model_copy(update={"method": "fedavg", "regularizers": ()})
    federation, answers, case = Federation(settings, tmp_path), {}, None
    for number in range(3) if name == "join, own data" else ():
        federation.stop(number)
        federation.start(number, own_data=True)

    def instead(node, message, deliver):
        here = node, message.metadata.message_type
        if here not in answers or settings.secagg == "full":
            reply = deliver()
            if reply.has_error() or link.FAULT in reply.content.config_records:
                return reply
            answers[here] = asked(reply)
        value = answers[here]
        return answer(message, replaced(value, *case) if case and here == (federation.nodes[1], kind) else value)

    def a_round():
        session = federation.session()
        session.round(0)
        MemberPopulation(federation.stream, settings, session.engine.members).fraction((0, 1, 2), (0,))
        json.dumps(session.recorder.sink.rows)

    federation.network.fault = instead
    a_round()
    cases = [(path, junk) for path in places(answers[federation.nodes[1], kind]) for junk in JUNK]
    fatal = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # such as NaN in a matrix
        for case in cases[::every]:
            try:
                a_round()
            except Exception as error:
                fatal.append((*case, repr(error)))
    assert not fatal, "\n".join(map(str, fatal))
