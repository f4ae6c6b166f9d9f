"""Deployments: the figures of engine=loop, what stays on the nodes, and what a killed server or node takes up again."""

import json
import re
import shutil
from itertools import chain

import numpy as np
import pytest
import torch

from cfl.aggregation import secagg_client
from cfl.assembly.privacy_rules import shows_each
from cfl.core import ConfigError, plugins
from cfl.core.tree import Tree
from cfl.flower import home, link, wire
from cfl.runtime import tree_file
from tests import toy
from tests.flower.federation import PUBLIC, Clock, Federation, Log, alone, at, figures, lost, read, unlike
from tests.flower.test_simulation import PRIVATE
from tests.runtime.test_resume import Killed

STRATEGIES = {name: plugins.strategies.get(name) for name in plugins.strategies.names()}
LOCAL = {name: plugins.local.get(name) for name in plugins.local.names()}
METHODS = [*STRATEGIES, *LOCAL]
ALL = ("cohort=6", "partition.clients=6")


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """No test waits for a deadline."""
    monkeypatch.setattr(link, "time", Clock())


def config(*options, method="fedavg"):
    public = ("public.name=stream",) * (method in PUBLIC)
    return toy.config("tasks=2", *public, *options, method=method)


def bare(config):
    """The configuration with the same secure sums, but without masks."""
    return config.model_copy(update={"secagg": "sum"}) if config.secagg == "full" else config


def deployed(config, folder, nodes=3, **own):
    log = Log()
    return Federation(config, folder, nodes, **own).run(log), log


def same(plain, found, config, tolerance=1e-10):
    """Compare a run in one process with a deployment, whose server does not see what protection hides.

    Under secure sums they are equal to the bit.
    """
    hidden = {"loss": None} if (config.secagg, config.dp.level) != ("none", "none") else {}
    hidden |= {"shortened": 0} if config.dp.level != "none" else {}
    assert all(row[name] == value for row in found[1].rows for name, value in hidden.items())
    seen = [
        {**run, "rows": [{name: value for name, value in row.items() if name not in hidden} for row in run["rows"]]}
        for run in (figures(*plain), figures(*found))
    ]
    assert list(unlike(*seen, 0.0 if config.secagg == "full" else tolerance)) == []


PLAIN = [(method, "none") for method in METHODS]
QUICK = [*((name, "none") for name in (*toy.STRATEGIES, *toy.RULES)), ("fot", "full"), ("scaffold", "full")]
SECURE = [(name, "full") for name in METHODS if not shows_each((STRATEGIES | LOCAL)[name]())]


@pytest.mark.parametrize(("method", "secagg"), toy.quick(*QUICK, of=[*PLAIN, *SECURE]))
def test_every_method_has_the_figures_of_the_loop(method, secagg, tmp_path):
    settings, own = config(f"secagg={secagg}", method=method), {"model": toy.mlp(8, 6, 6, 2)}
    found = deployed(settings, tmp_path, **own)
    same(alone(bare(settings), **own), found, settings)
    assert found[1].warnings == [] and all("missing" not in row for row in found[1].rows)


HIDDEN = ("dp.noise_multiplier=1", "dp.accountant=rdp", "agg.weights=uniform", "sampling=poisson")
OPTIONS = {
    "privacy": (PRIVATE, "scaffold"),
    "privacy by secure sums": ((*PRIVATE, "secagg=full"), "fot"),
    "privacy of sketches": (("dp.protect=work", *PRIVATE[:2], *PRIVATE[3:], "secagg=full"), "fot"),
    "privacy of samples": (("dp.level=example", *PRIVATE), "fedavg"),
    "cohorts by chance": ((*HIDDEN, "cohort=1"), "fedavg"),
    "drop-outs": (("drop_rate=0.3", "partition.clients=8", "cohort=6"), "scaffold"),
    "drop-outs of secure sums": (("secagg=full", "drop_rate=0.3", "partition.clients=8", "cohort=6"), "scaffold"),
    "signed lists": (("secagg=full", "secure.consistency=true", "secure.quorum=0.8", *ALL), "scaffold"),
    "16 bits": (("secagg=full", "secure.bits=16", "secure.fraction_bits=6", "agg.weights=uniform"), "fedavg"),
    "other shares": (("partition.name=lda", "partition.min_samples=3", "local.batch_size=3", *ALL), "er"),
}


@pytest.mark.filterwarnings("ignore:the noise hides all directions")
@pytest.mark.parametrize(
    "name", toy.quick("privacy of samples", "drop-outs of secure sums", "signed lists", "16 bits", of=OPTIONS)
)
def test_options_change_the_figures_as_under_the_loop(name, tmp_path):
    options, method = OPTIONS[name]
    settings, own = config(*options, method=method), {"model": toy.mlp(8, 6, 6, 2)}
    plain, found = alone(bare(settings), **own), deployed(settings, tmp_path, **own)
    same(plain, found, settings)
    assert plain[0].metrics.get("epsilon") == found[0].metrics.get("epsilon")
    assert [row["aborted"] for row in found[1].rows].count(None) > 0
    told = [text for text in plain[1].warnings if "clipped" in text or "aborted" in text]
    assert told == [text for text in found[1].warnings if "clipped" in text or "aborted" in text]


def test_any_division_of_the_clients_gives_the_figures_of_the_loop(tmp_path):
    """Sums are of integers, and nodes are merged in the order of their clients, so that no bit changes."""
    settings = config(*ALL, "secagg=full", method="scaffold")
    plain = alone(bare(settings))
    for nodes in (1, 2, 6):
        same(plain, deployed(settings, tmp_path / str(nodes), nodes), settings)


def test_the_ids_of_the_nodes_change_no_bit(tmp_path):
    runs = []
    for ids in ([1, 2, 3], [3, 1, 2], [2**63, 7, 5]):
        log = Log()
        result = Federation(config(*ALL, method="scaffold"), tmp_path / str(ids), ids=ids).run(log)
        runs.append(figures(result, log))
    assert [list(unlike(runs[0], other, 0.0)) for other in runs[1:]] == [[], []]


def test_the_run_counts_the_bytes_of_the_messages(tmp_path):
    federation = Federation(config("secagg=full"), tmp_path)
    metrics = federation.run().metrics
    requests, replies = zip(*((one.request, one.reply) for one in federation.network.sent))
    assert metrics["wire_bytes_down"] == sum(wire.size(read(data)) for data in requests)
    assert metrics["wire_bytes_up"] == sum(wire.size(read(data)) for data in replies)


@pytest.mark.parametrize("how", ["observe", "eval_local"])
def test_local_models_cannot_be_observed(how, tmp_path):
    session = Federation(config(f"eval_local={int(how == 'eval_local')}"), tmp_path).session()
    with pytest.raises(ConfigError, match="local models stay on their nodes; set eval_local=0, and run without obs"):
        session.round(0, (lambda *seen: None) if how == "observe" else None)


# --- what stays on the nodes -----------------------------------------------------------------------------------------


def secrets_of(context):
    """The secrets of secure aggregation in a node's memory: seeds and private keys, as bytes."""
    parties = wire.unpack(context.state)["parties"].values() if context.state else ()
    seeds = [seed for party in parties for seed in party["seeds"].values()]
    masks = [secagg_client.mask_key_of(party["seeds"]["mask"]).private_bytes_raw() for party in parties]
    return {*seeds, *masks, *(party["cipher"] for party in parties)}


def contents(value):
    """All bytes in a value: of tensors, of arrays, and of the keys, shares and ciphertexts."""
    if isinstance(value, dict):
        return b"".join(contents(key) + contents(item) for key, item in value.items())
    if isinstance(value, list | tuple):
        return b"".join(map(contents, value))
    if isinstance(value, torch.Tensor):
        return value.contiguous().numpy().tobytes()
    return value if isinstance(value, bytes) else value.tobytes() if isinstance(value, np.ndarray) else b""


def pieces(leaves: Tree):
    """Bytes of leaves, of several numbers each: a single one, such as a count, may occur by chance."""
    return {leaf.numpy().tobytes() for leaf in leaves.values() if leaf.numel() > 2 and leaf.is_floating_point()}


def states_of(folder):
    """Leaves of all states in a node's folder."""
    found = [tree_file.decode(path.read_bytes())[0]["state"] for path in folder.rglob("*.safetensors")]
    return set(chain.from_iterable(map(pieces, found)))


def test_the_server_sees_masked_sums_and_neither_states_nor_secrets(tmp_path, monkeypatch):
    federation = Federation(config("secagg=full", *ALL, method="scaffold"), tmp_path)
    hidden, mask = set(), home.Party.mask

    def masked(self, vector, told):
        found = mask(self, vector, told)
        assert (found != vector).any()
        hidden.add(vector.tobytes())
        return found

    def remember(node, message, deliver):
        reply = deliver()
        hidden.update(secrets_of(federation.network.contexts[node]))
        return reply

    monkeypatch.setattr(home.Party, "mask", masked)
    federation.network.fault = remember
    session = federation.session()
    for position in range(len(session.schedule)):
        session.round(position)
        hidden |= states_of(tmp_path)
    messages = [data for one in federation.network.sent for data in (one.request, one.reply)]
    passed = b"".join(messages) + b"".join(contents(wire.unpack(read(data))) for data in messages)
    # 6 clients and 4 rounds: a vector, two seeds, two private keys; and of each state two weights and two biases
    assert len(hidden) >= 6 * 4 * (1 + 4 + 4)
    assert not [data for data in hidden if data in passed]
    assert all(own.keys() <= {"strategy/elsewhere", "regularizers/elsewhere"} for own in session.state.clients.values())
    assert session.state.clients.keys() == set(range(6))
    # what does pass, and is found by the same search: the masked vectors
    vectors = [
        vector
        for one in federation.network.sent
        if one.kind == "train"
        for vector in wire.unpack(read(one.reply))["part"]["_integers"].values()
    ]
    assert len(vectors) == 24 and all(vector.tobytes() in passed for vector in vectors)


def test_a_reply_under_secure_aggregation_holds_nothing_but_masked_vectors(tmp_path):
    federation = Federation(config("secagg=full", *ALL, method="scaffold"), tmp_path)
    federation.run()
    for one in federation.network.sent:
        if one.kind == "train":
            found = wire.unpack(read(one.reply))
            vectors = found["part"].pop("_integers")
            floats = [leaf for leaf in _tensors(found) if leaf.is_floating_point()]
            assert vectors and found["losses"] == {}
            assert not any(leaf.any() for leaf in floats)  # outlines, and the empty sum of floats


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors(item)


# --- killed and resumed ----------------------------------------------------------------------------------------------

RESUMED = {"scaffold": "none", "er": "none", "moon": "full", "fot": "full"}


def left(folder):
    """Metrics and rows that a finished run leaves behind."""
    rows = [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]
    return {**json.loads((folder / "metrics.json").read_text()), "rows": rows}


def dies():
    raise Killed


@pytest.mark.parametrize("method", toy.quick("er", "fot", of=RESUMED))
def test_a_killed_server_resumes_with_the_states_on_its_nodes(method, tmp_path):
    settings = config(f"secagg={RESUMED[method]}", method=method)
    whole = Federation(settings, tmp_path / "whole")
    result = whole.run(output=tmp_path / "output")
    rounds = len(left(tmp_path / "output")["rows"])
    for after in range(2, rounds + 1) if method == "scaffold" else [rounds // 2 + 1]:
        federation, output = Federation(settings, tmp_path / f"nodes {after}"), tmp_path / f"output {after}"
        with pytest.raises(Killed):
            federation.run(Log({after: dies}), output)
        again = federation.run(output=output, resume=True)
        assert list(unlike(left(tmp_path / "output"), left(output), 0.0)) == [], after
        assert list(unlike(result.params, again.params, 0.0)) == [], after


def test_a_server_may_resume_from_the_checkpoint_before_the_last(tmp_path):
    settings = config(*ALL, "rounds=4", method="scaffold")
    Federation(settings, tmp_path / "whole").run(output=tmp_path / "output")
    federation, part = Federation(settings, tmp_path / "nodes"), tmp_path / "part"
    with pytest.raises(Killed):
        federation.run(Log({4: dies}), part)
    newest = max((part / "checkpoints").glob("checkpoint-*"))
    newest.write_bytes(newest.read_bytes()[:-10])
    log = Log()
    federation.run(log, part, resume=True)
    assert [text for text in log.warnings if "is damaged and skipped" in text] == log.warnings != []
    assert list(unlike(left(tmp_path / "output"), left(part), 0.0)) == []


@pytest.mark.parametrize("secagg", ["none", "full"])
@pytest.mark.parametrize("method", toy.quick("er", of=["scaffold", "er"]))
def test_a_node_that_restarts_takes_up_the_states_of_its_clients(method, secagg, tmp_path):
    settings = config(f"secagg={secagg}", *ALL, "rounds=3", method=method)
    federation = Federation(settings, tmp_path)

    def restart():
        federation.stop(1)
        federation.start(1)

    log = Log({1: restart, 2: restart, 4: restart})
    found = federation.run(log), log
    same(alone(bare(settings)), found, settings, 1e-6)
    assert log.warnings == [] and federation.said.count("node 'n1' (clients 1, 4) has joined") == 4


def test_old_versions_of_a_state_are_removed(tmp_path):
    """A run may return to the two last checkpoints, so at most three versions of a state are needed."""
    federation = Federation(config(*ALL, "rounds=6", method="scaffold"), tmp_path / "nodes")
    counts = []
    log = Log(dict.fromkeys(range(1, 12), lambda: counts.append(len([*tmp_path.rglob("client-1/*")]))))
    federation.run(log, tmp_path / "output")
    assert counts[0] == 1 and max(counts) <= 4  # a checkpoint is written while the next round runs


def lost_folder(federation, number):
    shutil.rmtree(federation.folder / f"node {number}")


def damaged_folder(federation, number):
    for path in (federation.folder / f"node {number}").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-4])


LOST = {
    lost_folder: r"client 1 has no state of round 2 \(.*\); put the node's folder back, or give the client a new id",
    damaged_folder: r"the state of client 1 is damaged \(.*\)",
}


@pytest.mark.parametrize("harm", LOST)
@pytest.mark.parametrize("secagg", ["none", "full"])
def test_clients_whose_states_are_lost_are_named_and_left_out(secagg, harm, tmp_path):
    settings = config("tasks=1", f"secagg={secagg}", *ALL, "rounds=4", method="scaffold")
    federation = Federation(settings, tmp_path)
    log = Log({2: lambda: harm(federation, 1)})
    found = federation.run(log), log
    gone = {1: "upload", 4: "upload"}
    same(alone(bare(settings), lost={2: gone, 3: gone}), found, settings, 1e-6)
    for row in log.rows[2:]:
        assert row["missing"].keys() == {1, 4}
        assert all(re.fullmatch(rf"node 'n1' \(clients 1, 4\): {LOST[harm]}", text) for text in row["missing"].values())


def test_a_method_without_states_does_not_miss_the_folder(tmp_path):
    settings = config(*ALL)
    federation = Federation(settings, tmp_path)
    log = Log({1: lambda: lost_folder(federation, 1)})
    same(alone(settings), (federation.run(log), log), settings, 1e-6)
    assert log.warnings == []


@pytest.mark.parametrize("secagg", ["none", "full"])
def test_states_outlast_rounds_that_the_server_did_not_take(secagg, tmp_path):
    """Rounds 1 to 4 are aborted, because of nodes 1 and 2: all states are those of round 0 when round 5 begins."""
    settings = config("tasks=1", f"secagg={secagg}", *ALL, "rounds=7", method="scaffold")
    federation = Federation(settings, tmp_path / "nodes")
    nodes, last = [federation.nodes[1], federation.nodes[2]], "train" if secagg == "none" else "query.unmask"
    federation.network.fault, log = at(last, range(1, 5), nodes, lost), Log()
    federation.run(log, tmp_path / "output")
    assert [bool(row["aborted"]) for row in log.rows] == [False, True, True, True, True, False, False]
    assert "missing" not in log.rows[5]
