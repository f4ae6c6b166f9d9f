"""Traces equal untraced steps to the bit; work that reads numbers which change between steps is not traced."""

import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Ctx
from cfl.engines import traced
from tests import toy

OPTIONS = {"fedproj": ("public.name=stream",), "moon": ("regularizer.moon.mu=1.0",)}


def normed():
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))


@pytest.fixture
def after(monkeypatch):
    """A function that sets after how many equal shapes a trace is recorded, and returns the list of recordings."""

    def set_to(times):
        tries, trace = [], traced.record

        def tried(*args, **options):
            tries.append(trace(*args, **options))
            return tries[-1]  # the trace or None, and the fields read

        monkeypatch.setattr(traced, "AFTER", times)
        monkeypatch.setattr(traced, "record", tried)
        return tries

    return set_to


def weights(label, *overrides, multi_head=False, model=None):
    """The model after two tasks of two rounds; clients of unequal size train in blocks of three."""
    own = [option for rule in label.split("+") for option in OPTIONS.get(rule, ())]
    options = ["tasks=2", "cohort=3", "engine=vmapped", "block=3", "local.lr=0.1", "partition.name=lda", *own]
    config = toy.config(*options, *overrides, method=label)
    return cfl.run(config, stream=toy.stream(tasks=2, multi_head=multi_head), model=model).params


def assert_same_bits(one, other):
    assert list(one) == list(other) and all(torch.equal(one[name], other[name]) for name in one)


LABELS = [("fedavg", True), ("ewc", True), ("er", True), ("fot+fedsol", False), ("gpm+scaffold", False)]
LABELS += [("moon", False)]


@pytest.mark.parametrize(("label", "multi_head"), toy.quick(("fot+fedsol", False), of=LABELS))
def test_a_run_has_the_same_bits_with_and_without_traces(label, multi_head, after):
    tries = after(1)
    at_once = weights(label, "model.dropout=[0.2,0.2]", multi_head=multi_head)
    assert any(trace for trace, _ in tries)
    tries = after(10**6)
    assert_same_bits(at_once, weights(label, "model.dropout=[0.2,0.2]", multi_head=multi_head))
    assert not tries


@pytest.mark.parametrize("norm_stats", toy.quick("running", of=["per_task", "running", "batch"]))
def test_buffers_are_those_of_the_untraced_step(norm_stats, after):
    after(2)
    options, module = (f"model.norm_stats={norm_stats}", "local.momentum=0.9"), normed()
    some = weights("fedavg", *options, model=module)
    after(10**6)
    assert_same_bits(some, weights("fedavg", *options, model=module))


@pytest.mark.slow
def test_a_method_that_reads_the_step_number_is_not_traced(after):
    tries = after(1)
    found = weights("fedproj")  # FedProj picks its memory batch by ctx.step
    assert any("step" in read for _, read in tries)
    after(10**6)
    assert_same_bits(found, weights("fedproj"))


def block():
    """Inputs of traced work: weights of two clients."""
    return {"params": {"w": torch.tensor([[1.0, 2.0], [3.0, 4.0]])}}


def context(kind):
    return kind(*[None] * len(Ctx._fields))


def test_each_shape_has_its_own_trace(after):
    tries, traces = after(2), traced.Traces()

    def doubled(inputs, kind):
        return {"found": {"w": 2 * inputs["params"]["w"]}, "none": {}}

    for inputs in (block(), block(), {"params": {"w": torch.ones(1, 2)}}, {"params": {"w": torch.full((2, 2), 7.0)}}):
        result = traces(doubled, inputs, task=0, alike=True)
        assert list(result) == ["found", "none"] and torch.equal(result["found"]["w"], 2 * inputs["params"]["w"])
    assert len(tries) == 1  # for the shape that came twice; the last inputs use it


@pytest.mark.parametrize("reads", [True, False])
def test_a_trace_that_reads_the_task_serves_that_task_alone(reads, after):
    tries, traces = after(1), traced.Traces()
    for task in (3, 4, 3):
        factor = lambda kind, task=task: context(kind)._replace(task=task).task if reads else 2  # noqa: E731
        work = lambda inputs, kind: {"": {"": inputs["params"]["w"] * factor(kind)}}  # noqa: E731, B023
        result = traces(work, block(), task=task, alike=True)
        assert torch.equal(result[""][""], (task if reads else 2) * block()["params"]["w"])
    assert len(tries) == (2 if reads else 1) and all(trace for trace, _ in tries)


def test_a_model_that_is_not_alike_for_all_tasks_has_a_trace_for_each(after):
    """Its operations may depend on the task although nothing reads it from a context."""
    tries, traces = after(1), traced.Traces()
    for task in (2, 3, 2):
        work = lambda inputs, kind, task=task: {"": {"": task * inputs["params"]["w"]}}  # noqa: E731
        assert torch.equal(traces(work, block(), task=task, alike=False)[""][""], task * block()["params"]["w"])
    assert len(tries) == 2


def test_only_operations_that_return_their_input_are_left_out():
    aten = torch.ops.aten

    def work(inputs, kind):
        x = inputs["params"]["x"]
        moved = {"back": x.transpose(0, 1).transpose(0, 1), "on": x.transpose(0, 1).transpose(1, 2)}
        seen = {"same": x.view(2, 3, 4), "flat": x.view(24), "part": x[:1], "wide": x[:, :, :1].expand(2, 3, 5)}
        return {"": {"once": aten.mul.Scalar(x, 1), "twice": aten.mul.Scalar(x, 2), **moved, **seen}}

    inputs = {"params": {"x": torch.arange(24.0).view(2, 3, 4)}}
    trace, _ = traced.record(work, inputs)
    assert_same_bits(trace(inputs)[""], work(inputs, Ctx)[""])


def test_a_trace_that_reads_the_learning_rate_serves_that_rate_alone(after):
    tries, traces = after(1), traced.Traces()
    for lr in (0.5, 0.25, 0.5):
        factor = lambda kind, lr=lr: context(kind)._replace(lr=lr).lr  # noqa: E731
        work = lambda inputs, kind: {"": {"": inputs["params"]["w"] * factor(kind)}}  # noqa: E731, B023
        assert torch.equal(traces(work, block(), task=0, alike=True, lr=lr)[""][""], lr * block()["params"]["w"])
    assert len(tries) == 2 and all(trace for trace, _ in tries)


@pytest.mark.parametrize("field", ["step", "key"])
def test_work_that_reads_a_changing_number_is_computed_every_time(field, after):
    tries, traces = after(1), traced.Traces()
    for value in (2.0, 5.0):
        work = lambda inputs, kind, value=value: {  # noqa: E731
            "": {"": inputs["params"]["w"] * getattr(context(kind)._replace(**{field: value}), field)}
        }
        assert torch.equal(traces(work, block(), task=0, alike=False)[""][""], value * block()["params"]["w"])
    assert len(tries) == 1 and field in tries[0][1]


def test_work_that_cannot_be_traced_runs_untraced(after):
    tries, traces = after(1), traced.Traces()

    def branches(inputs, kind):
        w = inputs["params"]["w"]
        return {"": {"": w if float(w.sum()) > 0 else -w}}  # make_fx refuses a branch on a value

    assert torch.equal(traces(branches, block(), task=0, alike=False)[""][""], block()["params"]["w"])
    assert [trace for trace, _ in tries] == [None]


def test_a_trace_draws_like_the_untraced_step():
    """Dropout draws from the global generator: recording draws nothing, and every repetition draws anew."""

    def dropped(inputs, kind):
        torch.rand(3)  # unused, but the next draw depends on it
        return {"": {"": nn.functional.dropout(inputs["params"]["w"], 0.5)}}

    inputs = {"params": {"w": torch.ones(4, 50)}}
    found = []
    for times in (1, 10**6):
        torch.manual_seed(0)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(traced, "AFTER", times)
            traces = traced.Traces()
            found.append([traces(dropped, inputs, task=0, alike=False)[""][""] for _ in range(3)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert not torch.equal(found[0][0], found[0][1])


def test_a_trace_that_is_unused_for_long_makes_way(monkeypatch, after):
    """Room for two traces: a third one is recorded once the first has not been used for five steps."""
    tries, traces = after(1), traced.Traces()
    monkeypatch.setattr(traced, "MOST", 2)
    monkeypatch.setattr(traced, "UNUSED", 5)

    def step(size):
        inputs = {"params": {"w": torch.ones(size)}}
        found = traces(lambda given, kind: {"params": {"w": 2 * given["params"]["w"]}}, inputs, 0, True)
        assert found["params"]["w"].equal(torch.full((size,), 2.0))
        return len(tries)

    assert [step(size) for size in (1, 2, 3, 1)] == [1, 2, 2, 2]  # both are in use: no room
    assert [step(3) for _ in range(4)] == [2, 2, 3, 3]  # the third of them is five steps after that of size 2
    assert step(1) == 3  # was used since then, and is kept
    assert step(2) == 3  # no room


def test_a_trace_for_one_learning_rate_replaces_no_other(monkeypatch, after):
    """It may serve a few steps, which take less time than its recording."""
    tries, traces = after(1), traced.Traces()
    monkeypatch.setattr(traced, "MOST", 2)
    monkeypatch.setattr(traced, "UNUSED", 0)
    for lr in (0.5, 0.25, 0.125, 0.0625):
        work = lambda inputs, kind, lr=lr: {"": {"": inputs["params"]["w"] * context(kind)._replace(lr=lr).lr}}  # noqa: E731
        assert torch.equal(traces(work, block(), task=0, alike=True, lr=lr)[""][""], lr * block()["params"]["w"])
    assert len(tries) == 2


def test_steps_that_read_the_learning_rate_are_not_compiled(monkeypatch):
    """Each rate would be compiled anew."""
    compiled = []
    monkeypatch.setattr(traced, "compiled", lambda graph, leaves: compiled.append(graph) or graph)
    options = ["compile=true", "local.lr_decay=0.9", "strategy.max_fisher=auto"]
    found = weights("ewc", *options)
    assert not compiled
    assert_same_bits(found, weights("ewc", *options[1:]))
    weights("fedavg", "compile=true")
    assert compiled
