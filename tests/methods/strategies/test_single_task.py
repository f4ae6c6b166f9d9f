"""Single task: the first task is FedAvg, and tasks are independent of each other."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Phase, RoundInfo
from cfl.core import rng, tree
from cfl.engines import LoopEngine, Outcome
from cfl.engines.evaluate import accuracy
from cfl.methods.strategies.single_task import SingleTask
from cfl.models import Model
from tests import toy

LEARNS = ("local.lr=0.2", "rounds=6")


# --- helpers ---------------------------------------------------------------------------------------------------------


Recorder = toy.recording(SingleTask)


def run(*overrides, stream=None, **options):
    """A run that learns: its result, the last state of the server, and the recorder."""
    rule = Recorder()
    config = toy.config(*LEARNS, *overrides, method="single_task")
    result = cfl.run(config, stream=stream or toy.stream(), strategy=rule, **options)
    return result, rule.rounds[-1][2], rule


def normed():
    with rng.fork(1):
        return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


def equal(a, b):
    return set(a) == set(b) and all(torch.equal(a[name], leaf) for name, leaf in b.items())


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_two_tasks_by_hand():
    # From (1, 2): one round of task 0 with a mean step of (0.5, -1), two of task 1 with steps (1, 1) and (0, 2).
    model = Model(nn.Linear(2, 1, bias=False), (2,), [1, 1], multi_head=False)
    rule, phase = SingleTask(), Phase("train", 2)
    start = {"weight": torch.tensor([[1.0, 2.0]])}
    server = {"params": start, **rule.init_server(start, model)}
    expected = [(0, 0, (0.5, -1.0), (0.5, 3.0)), (1, 0, (1.0, 1.0), (0.0, 1.0)), (1, 1, (0.0, 2.0), (0.0, -1.0))]
    came_down = []
    for task, number, moved, after in expected:
        if number == 0 and task:
            server = rule.begin_task(server, task, model)
        info = RoundInfo(task, 2, phase, number, (0,), ("weight",), frozenset(), (task,), 1, 0.1, model, 0)
        came_down.append(rule.broadcast(server, info)["params"]["weight"].flatten().tolist())
        server = rule.absorb(server, {"strategy": {"weight": torch.tensor([moved])}}, info, 1.0)
        assert rule.serve(server, task)["weight"].flatten().tolist() == list(after)
    assert came_down == [[1.0, 2.0], [1.0, 2.0], [0.0, 1.0]]
    assert rule.serve(server, 0)["weight"].flatten().tolist() == [0.5, 3.0]  # unchanged
    assert start["weight"].flatten().tolist() == [1.0, 2.0]


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi_head", [False, True])
def test_the_first_task_is_fedavg_to_the_byte(multi_head):
    options = ("local.momentum=0.9", "model.dropout=[0.2,0.2]")
    single, server, _ = run(*options, stream=toy.stream(multi_head=multi_head))
    stream = toy.stream(1, multi_head=multi_head)
    alone = cfl.run(toy.config(*LEARNS, *options, "tasks=1", method="fedavg"), stream=stream)
    served = SingleTask().serve(server, 0)
    assert all(torch.equal(served[name], leaf) for name, leaf in alone.params.items())
    assert single.accuracy_matrix[2, 0] == alone.accuracy_matrix[0, 0]


def test_a_stream_of_one_task_is_fedavg_to_the_byte():
    config = toy.config(*LEARNS, "tasks=1", method="single_task")
    single = cfl.run(config, stream=toy.stream(1))
    fedavg = cfl.run(toy.config(*LEARNS, "tasks=1", method="fedavg"), stream=toy.stream(1))
    assert equal(single.params, fedavg.params)
    assert single.metrics["accuracy_matrix"] == fedavg.metrics["accuracy_matrix"]


# --- property --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("multi_head", [False, True])
def test_a_task_does_not_depend_on_the_tasks_before_it(multi_head):
    stream = toy.stream(multi_head=multi_head)
    first, second, third = stream.tasks
    learnt, moved_on = [], []
    for before in (first, third):
        pair = replace(stream, tasks=(before, second))
        result, server, _ = run("tasks=2", stream=pair)
        learnt.append((SingleTask().serve(server, 1), result.accuracy_matrix[1, 1]))
        moved_on.append(cfl.run(toy.config(*LEARNS, "tasks=2", method="fedavg"), stream=pair).params)
    own = [name for name in learnt[0][0] if not name.endswith("@0")]
    assert all(torch.equal(learnt[0][0][name], learnt[1][0][name]) for name in own)
    assert learnt[0][1] == learnt[1][1]
    assert not equal(*moved_on)  # FedAvg's second task depends on the first


@pytest.mark.parametrize("multi_head", [False, True])
def test_nothing_is_forgotten_and_forgetting_is_not_defined(multi_head, tmp_path):
    result, _, _ = run(stream=toy.stream(multi_head=multi_head), model=normed(), output=tmp_path)
    assert (result.accuracy_matrix[1, 0], result.accuracy_matrix[2, 0], result.accuracy_matrix[2, 1]) == (
        result.accuracy_matrix[0, 0],
        result.accuracy_matrix[0, 0],
        result.accuracy_matrix[1, 1],
    )
    written = json.loads((tmp_path / "metrics.json").read_text())
    assert written["fgt"] is None and written["bwt"] is None
    assert written["acc"] == pytest.approx(result.accuracy_matrix[2].mean()) and written["learning_accuracy"] is None
    fedavg = cfl.run(toy.config(*LEARNS, method="fedavg"), stream=toy.stream(), model=normed())
    assert fedavg.metrics["fgt"] > 0.1  # FedAvg does forget


# --- the server's models ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_stats", ["per_task", "running"])
def test_serve_gives_the_model_of_each_task_as_its_last_round_left_it(norm_stats):
    result, server, rule = run(f"model.norm_stats={norm_stats}", model=normed())
    for task in range(3):
        info, _, after = [row for row in rule.rounds if row[0].task == task][-1]
        served = rule.serve(server, task)
        assert set(served) == set(result.model.params)
        assert any("running_mean" in name for name in info.names)  # statistics belong to the model
        assert all(torch.equal(served[name], after["params"][name]) for name in info.names)
        test = toy.stream().tasks[task].test
        assert accuracy(result.model, served, test, task, 1024) == result.accuracy_matrix[2, task]
    weights = [rule.serve(server, task)["0.weight"] for task in range(3)]
    assert not torch.equal(weights[0], weights[1]) and not torch.equal(weights[1], weights[2])


@pytest.mark.parametrize("multi_head", [False, True])
def test_a_task_whose_rounds_were_all_aborted_is_served_by_the_initial_weights(multi_head, monkeypatch):
    def aborting(self, inputs, *args):
        return Outcome(aborted="too few") if inputs.info.task == 1 else original(self, inputs, *args)

    original = LoopEngine.round
    monkeypatch.setattr(LoopEngine, "round", aborting)
    with pytest.warns(UserWarning, match="round aborted"):
        result, server, rule = run(stream=toy.stream(multi_head=multi_head))
    assert equal(rule.serve(server, 1), result.model.params)
    for task in (0, 2):
        assert not equal(rule.serve(server, task), result.model.params)
    test = toy.stream(multi_head=multi_head).tasks[1].test
    untrained = accuracy(result.model, result.model.params, test, 1, 1024)
    matrix = result.accuracy_matrix
    assert matrix[1, 1] == matrix[2, 1] == untrained  # not the accuracy of the task before or after
    assert matrix[2, 0] == matrix[0, 0]


def test_every_task_starts_from_the_initial_weights_and_goes_on_from_its_own():
    result, _, rule = run("model.norm_stats=running", model=normed())
    for (info, down, _), (_, _, before) in zip(rule.rounds, [rule.rounds[0], *rule.rounds], strict=False):
        expected = before["params"] if info.round else result.model.params
        assert equal(down["params"], tree.select(expected, info.names))
    assert [info.round for info, *_ in rule.rounds] == [0, 1, 2, 3, 4, 5] * 3


def test_clients_send_and_store_what_they_do_with_fedavg():
    single, fedavg = (
        cfl.run(toy.config(method=name), stream=toy.stream()).metrics for name in ("single_task", "fedavg")
    )
    assert all(single[name] == fedavg[name] for name in ("bytes_by_phase", "client_bytes"))
    assert single["bytes_up"] == 3 * 2 * 3 * 4 * 110  # tasks, rounds, clients; the 8-6-6-2 MLP has 110 parameters


# --- conformance -----------------------------------------------------------------------------------------------------


def test_hooks_write_to_nothing_that_they_are_given():
    model = Model(nn.Linear(2, 1, bias=False), (2,), [1, 1], multi_head=False)
    rule, phase = SingleTask(), Phase("train", 2)
    server = {"params": tree.clone(model.params), **rule.init_server(model.params, model)}
    before = {name: tree.clone(leaves) for name, leaves in server.items()}
    info = RoundInfo(1, 2, phase, 0, (0,), ("weight",), frozenset(), (1,), 1, 0.1, model, 0)
    rule.broadcast(server, info)
    rule.absorb(server, {"strategy": {"weight": torch.ones(1, 2)}}, info, 1.0)
    rule.serve(server, 0)
    assert set(server) == set(before) and all(equal(server[name], leaves) for name, leaves in before.items())
