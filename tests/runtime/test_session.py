"""Rounds of the server alone, stacked uploads of `work`, and trees that clients keep for a task."""

from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch

import cfl
from cfl.contract import Phase, Strategy
from cfl.core import ConfigError, UpdateError, rng, tree
from tests import toy
from tests.runtime.test_resume import Killed, finished

ENGINES = {
    "loop": ("engine=loop",),
    "vmapped": ("engine=vmapped", "block=2"),
    "pool": ("engine=pool", "workers=2"),
    "flower": ("engine=flower", "flower.address=in-process"),
}
PRIVATE = ("dp.level=client", "dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson")
ROUNDS = 2 * (2 + 3)  # two tasks, each with two rounds of training and three of the server alone


# --- helpers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Alone(Strategy):
    """The server halves the parameters of the body in three rounds after the training of each task."""

    calls: list = field(default_factory=list)

    def plan(self, task, tasks, rounds):
        return [Phase("train", rounds), Phase("halve", 3, cohort="none", train=False)]

    def absorb(self, server, mean, info, lr):
        if info.phase.cohort != "none":
            return super().absorb(server, mean, info, lr)
        self.calls.append((info.task, info.round, mean, info.clients, info.expected, info.fraction))
        draws = torch.rand(3, generator=rng.generator(info.key))  # the key differs from round to round
        return {**server, "params": tree.map(lambda leaf: leaf / 2, server["params"]), "draws": {"u": draws}}

    def init_server(self, params, model):
        return {"draws": {"u": torch.zeros(3)}}


@dataclass(frozen=True)
class Trains(Strategy):
    """The same training, without rounds of the server."""


def run(strategy, *options, **more):
    config = toy.config("tasks=2", *options, method="fedavg")
    return cfl.run(config, stream=more.pop("stream", toy.stream(2)), strategy=strategy, **more)


# --- rounds of the server alone --------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_without_clients_is_the_servers_alone_under_every_engine(engine):
    strategy, sink = Alone(), toy.Rows()
    found = run(strategy, *ENGINES[engine], sink=sink)
    assert len(sink.rows) == ROUNDS
    assert [call[:2] for call in strategy.calls] == [(task, number) for task in range(2) for number in range(3)]
    assert all(call[2:] == ({}, (), 0.0, 0.0) for call in strategy.calls)
    for row in sink.rows:
        alone = row["phase"] == "halve"
        assert (row["bytes_up"] == row["bytes_down"] == 0) == alone and (row["loss"] is None) == alone
    plain = run(Alone())
    assert all(torch.allclose(leaf, plain.params[name], atol=1e-6) for name, leaf in found.params.items())
    ends = [row["accuracy"] for row in sink.rows if row["phase"] == "halve" and row["round"] == 2]
    assert ends == [found.accuracy_matrix[task, task] for task in range(2)]  # the task ends in the server's round


def test_one_task_is_its_training_and_three_halves():
    """Without clients only `absorb` changes the model: 1/2 three times is 1/8, which floats hold exactly."""
    trained = run(Trains(), "tasks=1", stream=toy.stream(1)).params
    halved = run(Alone(), "tasks=1", stream=toy.stream(1)).params
    assert all((leaf / 8).equal(halved[name]) for name, leaf in trained.items())


@pytest.mark.parametrize("killed_at", [3, 4, 5, 10])
def test_a_run_killed_in_a_round_of_the_server_resumes_to_the_same_bytes(killed_at, tmp_path):
    run(Alone(), output=tmp_path / "whole")

    class Dies(toy.NullSink):
        def round(self, row):
            if row["rounds_done"] == killed_at:
                raise Killed

    with pytest.raises(Killed):
        run(Alone(), output=tmp_path / "part", sink=Dies())
    last = sorted((tmp_path / "part/checkpoints").glob("checkpoint-*.safetensors"))[-1:]
    assert [path.stem for path in last] == [f"checkpoint-{killed_at - 1:06}"] * (killed_at > 1)
    strategy = Alone()
    run(strategy, output=tmp_path / "part", resume=True)
    assert finished(tmp_path / "part") == finished(tmp_path / "whole")
    left = [round for round in range(killed_at, ROUNDS + 1) if (round - 1) % 5 >= 2]
    assert len(strategy.calls) == len(left)  # rounds before the last checkpoint are not repeated


@pytest.mark.parametrize("options", [("secagg=full",), PRIVATE, ("drop_rate=0.5",)])
def test_rounds_of_the_server_are_no_release(options):
    strategy, sink = Alone(), toy.Rows()
    found = run(strategy, *options, sink=sink)
    assert [call[2:4] for call in strategy.calls] == [({}, ())] * 6
    rows = [row for row in sink.rows if row["phase"] == "halve"]
    assert all(row["aborted"] is None and row["dropped"] == {} and row["bytes_up"] == 0 for row in rows)
    assert found.metrics.get("epsilon") == run(Trains(), *options).metrics.get("epsilon")


# --- stacks of work --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Stacks(Strategy):
    """Each client sends its id and the number of its samples, as floating-point and whole numbers."""

    gathers: ClassVar = "stack"
    seen: list = field(default_factory=list)

    def plan(self, task, tasks, rounds):
        return [Phase("train", rounds, work=True), Phase("tell", train=False, work=True)]

    def work(self, params, client, shared, state, info):
        return {"id": torch.full((2,), float(client.id)), "samples": torch.tensor(len(client))}, state

    def absorb(self, server, mean, info, lr):
        self.seen.append((info.clients, mean["work"], set(mean)))
        return super().absorb(server, mean, info, lr)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stack_has_the_uploads_of_work_in_the_order_of_ids(engine):
    strategy = Stacks()
    found = run(strategy, *ENGINES[engine])
    assert len(strategy.seen) == 6  # two tasks, each with two rounds of training and one of work
    for number, (clients, work, owners) in enumerate(strategy.seen):
        assert list(clients) == sorted(clients) and len(clients) == 3
        assert work["id"].tolist() == [[client, client] for client in clients]
        assert work["samples"].tolist() == [12] * 3 and not work["samples"].is_floating_point()  # 48 over 4 clients
        assert owners == ({"strategy", "work"} if number % 3 < 2 else {"work"})
    plain = run(Trains())
    assert all(torch.allclose(leaf, plain.params[name], atol=1e-5) for name, leaf in found.params.items())


def test_a_stack_has_no_rows_of_clients_that_dropped_out():
    strategy = Stacks()
    run(strategy, "drop_rate=0.4", "seed=1")
    assert any(len(clients) < 3 for clients, *_ in strategy.seen)
    assert all(work["id"][:, 0].tolist() == [*clients] for clients, work, _ in strategy.seen)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("secagg=full",), "'Stacks' needs each client's own upload, which secagg=full hides; set secagg=none"),
        (PRIVATE, "'Stacks' needs each client's own upload, but dp.level=client protects sums only"),
    ],
)
def test_a_stack_is_refused_where_only_sums_are_protected(options, text):
    with pytest.raises(ConfigError, match=text):
        run(Stacks(), *options)


# --- trees that clients keep -----------------------------------------------------------------------------------------

KEPT = 10 * 4  # bytes of ten numbers


@dataclass(frozen=True)
class Sends(Strategy):
    """Sends ten numbers beside the model; the task's number, so that they change with the task alone."""

    cohorts: list = field(default_factory=list)

    def plan(self, task, tasks, rounds):
        phases = [Phase("train", rounds), Phase("think", cohort="none", train=False)]
        return phases[: 1 + (task == tasks - 1)]

    def broadcast(self, server, info):
        return {**super().broadcast(server, info), "numbers": {"n": torch.full((10,), float(info.task))}}

    def absorb(self, server, mean, info, lr):
        self.cohorts.append((info.task, info.clients))
        return super().absorb(server, mean, info, lr)


@dataclass(frozen=True)
class Keeps(Sends):
    kept: ClassVar = ("numbers",)


@pytest.mark.parametrize("engine", ["loop", "pool"])
def test_a_kept_tree_travels_once_to_each_client_and_task(engine):
    """Cohorts of 2 of 4 in three rounds of a task, and in one of the next. A client that was in the cohort before, in
    the same task, has the ten numbers already."""
    options, rows = ("cohort=2", "rounds=[3,1]", *ENGINES[engine]), {}
    for kind in (Sends, Keeps):
        sink, strategy = toy.Rows(), kind()
        found = run(strategy, *options, sink=sink)
        rows[kind] = [row["bytes_down"] for row in sink.rows]
    expected, seen, again = [], set(), 0
    for task, clients in strategy.cohorts:
        has = {(task, client) for client in clients}
        expected.append(KEPT * len(has & seen))
        again += len(has & seen)
        seen |= has
    assert again > 0 and len(seen) > 4  # some have them, some do not, and some had those of the first task alone
    assert [every - once for every, once in zip(rows[Sends], rows[Keeps], strict=True)] == expected
    # after the run, the clients of the last task store the numbers, and nothing else
    stored = [KEPT * ((1, client) in seen) for client in range(4)]
    assert found.metrics["client_bytes"] == sum(stored) / 4 and found.metrics["client_bytes_max"] == KEPT


def test_without_kept_trees_no_broadcast_is_made_for_counting():
    strategy = toy.recording(Strategy)()
    found = run(strategy)
    assert len(strategy.rounds) == 4 and found.metrics["client_bytes"] == 0


def test_clients_that_dropped_out_get_a_kept_tree_again():
    sink, strategy = toy.Rows(), Keeps()
    run(strategy, "tasks=1", "rounds=4", "drop_rate=0.5", stream=toy.stream(1), sink=sink)
    model = sink.rows[0]["bytes_down"] // 3 - KEPT  # in the first round nobody has the numbers
    seen, rows = set(), [row for row in sink.rows if row["phase"] == "train"]
    for row, (_, survivors) in zip(rows, strategy.cohorts):
        cohort = {*survivors, *map(int, row["dropped"])}
        assert row["bytes_down"] == 3 * model + KEPT * len(cohort - seen)
        seen |= {*survivors}


def test_a_resumed_run_knows_who_has_a_kept_tree(tmp_path):
    class Dies(toy.NullSink):
        def round(self, row):
            if row["rounds_done"] == 3:
                raise Killed

    options = ("cohort=2", "rounds=4")
    run(Keeps(), *options, output=tmp_path / "whole")
    with pytest.raises(Killed):
        run(Keeps(), *options, output=tmp_path / "part", sink=Dies())
    run(Keeps(), *options, output=tmp_path / "part", resume=True)
    assert finished(tmp_path / "part") == finished(tmp_path / "whole")


def test_a_state_may_become_empty():
    seen = []

    class Forgets(Strategy):
        def init_client(self, params, model):
            return {"n": torch.zeros(())}

        def finish(self, params, ctx, steps):
            seen.append(sorted(ctx.state))
            update, _ = super().finish(params, ctx, steps)
            return update, {} if "m" in ctx.state else {"m": torch.ones(())}

    cfl.run(toy.config("tasks=1", "rounds=3", "cohort=4"), stream=toy.stream(1), strategy=Forgets())
    assert seen == [["n"]] * 4 + [["m"]] * 4 + [[]] * 4


def test_under_differential_privacy_a_measurement_changes_no_model():
    class Learns(Strategy):
        def plan(self, task, tasks, rounds):
            return [Phase("train", rounds), Phase("look", cohort="available", train=False, work=True, diagnostic=True)]

        def work(self, params, client, shared, state, info):
            return {"n": torch.ones(())}, state

        def absorb(self, server, mean, info, lr):
            new = super().absorb(server, mean, info, lr)
            moved = tree.scale(new["params"], 0.5) if info.phase.diagnostic else new["params"]
            return {**new, "params": moved}

    private = ("dp.noise_multiplier=1", "agg.weights=uniform", "dp.amplify=false", "dp.accountant=rdp")
    with pytest.raises(UpdateError, match="absorb changes the broadcast"):
        cfl.run(toy.config("tasks=1", "rounds=1", "cohort=4", *private), stream=toy.stream(1), strategy=Learns())


def test_the_loss_of_a_round_is_the_mean_of_its_clients():
    class Ids(Strategy):
        def loss(self, logits, ctx):
            return 0 * logits.sum() + ctx.client

    sink = toy.Rows()
    cfl.run(
        toy.config("tasks=1", "rounds=1", "cohort=4", method="fedavg"), stream=toy.stream(1), strategy=Ids(), sink=sink
    )
    assert sink.rows[0]["loss"] == (0 + 1 + 2 + 3) / 4
