"""Task inference: columns, references and scores against brute force from stored features, by hand, and in runs."""

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch
from torch import nn

import cfl
from cfl.contract import Client, Phase, RoundInfo, Share
from cfl.core import ConfigError
from cfl.methods.strategies import FOT, GPM, FedProTIP
from cfl.methods.subspace.task_inference import OptionalTaskInference, TaskInference, references
from cfl.testing import check_strategy
from tests import toy

INFERRING = (FedProTIP(), FOT(infer_tasks=True, measure_coverage=False), GPM(infer_tasks=True))


def _growing(module, tasks=3):
    """A model with two classes a task, in float64."""
    return cfl.Model(module, (6,), (2,) * tasks, multi_head=True, growing=True)


def _round(model, task, clients=(0,)):
    model.module.eval()
    phase = Phase("features", cohort="available", train=False, work=True)
    return RoundInfo(task, model.tasks, phase, 0, tuple(clients), (), frozenset(), (task,), 4, 0.1, model, key=7)


def _client(x, task, id=0):
    y = torch.full((len(x),), 2 * task)
    samples = cfl.from_tensors([(x, y, x[:1], y[:1])]).tasks[0].train
    return Client(id, {task: Share(samples, torch.arange(len(x)))}, task, (task,))


def _collected(part, model, data):
    """The server after the features phases of several tasks. data: a list of the clients' inputs for each task."""
    server = {"params": model.params}
    for task, clients in enumerate(data):
        info = _round(model, task)
        ups = [part.feature_sums(model.params, _client(x, task, id), info) for id, x in enumerate(clients)]
        sums = {name: sum(up[name] for up in ups) for name in ups[0]}
        server = {**server, **part.with_core(server, sums, info)}
    return server


def _data(tasks=3):
    """Two clients with 30 and 12 samples of 6 numbers, which are larger along other axes in each task."""
    scales = [torch.tensor([3.0, 2, 1, 0.5, 0.5, 0.5]).roll(2 * task) for task in range(tasks)]
    return [[toy.random(n, 6, seed=10 * t + n) * scale for n in (30, 12)] for t, scale in enumerate(scales)]


# --- by hand ---------------------------------------------------------------------------------------------------------


def _axes(score, *moments):
    """A server with features of two numbers: the inputs themselves. moments: the diagonal of M_k of each task."""
    part, model = TaskInference(score=score, core_columns=1), _plane(len(moments))
    server = {"params": model.params}
    for task, diagonal in enumerate(moments):
        a, b = (4.0 * value for value in diagonal)  # a sum over four samples
        sums = {"features/moments": torch.tensor([a, 0.0, b]).double(), "features/count": torch.tensor([4.0]).double()}
        server |= part.with_core(server, sums, _round(model, task))
    return part, model, server


def _plane(tasks):
    return cfl.Model(toy.net(nn.Linear(2, 2)), (2,), (2,) * tasks, multi_head=True, growing=True)


def test_two_tasks_by_relevance():
    # B_0 = e1, B_1 = e2. The only score is |f_2|; its references are sqrt(1) and sqrt(9), so the border is 2.
    part, model, server = _axes("relevance", (4.0, 1.0), (0.0, 9.0))
    f = torch.tensor([[7.0, 1.9], [7.0, -1.9], [0.0, 2.1], [0.0, -9.0]]).double()
    assert part.infer_task(server, f, 1, model).tolist() == [0, 0, 1, 1]
    found = references([torch.diag(torch.tensor(d).double()) for d in ((4.0, 1.0), (0.0, 9.0))],
                       [server["core"]["columns/1"]])  # fmt: skip
    assert found.tolist() == [[1.0], [3.0]]


def test_two_tasks_by_share():
    # Each task has the axis on which its features are large: |f_1| against |f_2|.
    part, model, server = _axes("share", (4.0, 1.0), (0.0, 9.0))
    f = torch.tensor([[2.1, 2.0], [-2.1, 2.0], [1.9, 2.0], [0.0, -1.0]]).double()
    assert part.infer_task(server, f, 1, model).tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("score", ["relevance", "share"])
def test_the_first_task_is_inferred_while_it_is_the_only_one(score):
    part, model, server = _axes(score, (4.0, 1.0))
    assert part.infer_task(server, torch.ones(3, 2).double(), 0, model).tolist() == [0, 0, 0]


def test_three_tasks_by_relevance():
    # d = 3 and one column a task: e1, e2, e3. Scores are (|f_2|, |f_3|), and references (1, 1), (3, 0), (0, 2). A
    # sample has the direction (cos a, sin a): that of task 1 up to 22.5 degrees, of task 0 up to 67.5, else of task 2.
    module = toy.net(nn.Linear(3, 2))
    model, part = cfl.Model(module, (3,), (2,) * 3, multi_head=True, growing=True), TaskInference(core_columns=1)
    server = {"params": model.params}
    for task, diagonal in enumerate([(9.0, 1.0, 1.0), (0.0, 9.0, 0.0), (0.0, 0.0, 4.0)]):
        sums = {"features/moments": torch.diag(torch.tensor(diagonal).double())[*torch.triu_indices(3, 3)],
                "features/count": torch.ones(1).double()}  # fmt: skip
        server |= part.with_core(server, sums, _round(model, task))
    angles = torch.tensor([0.0, 22.0, 23.0, 67.0, 68.0, 90.0]).double().deg2rad()
    f = torch.stack([torch.full_like(angles, 5.0), 0.1 * angles.cos(), 0.1 * angles.sin()], dim=1)
    assert part.infer_task(server, f, 2, model).tolist() == [1, 1, 0, 0, 2, 2]


# --- brute force -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("score", ["relevance", "share"])
def test_inference_is_that_from_stored_features(score):
    model = _growing(toy.mlp(6, 9, 2))
    part, data = TaskInference(score=score, core_columns=2), _data()
    server = _collected(part, model, data)
    tests = torch.cat([torch.cat(clients) for clients in _data()])
    with torch.no_grad():
        stored = [model.features(model.params, torch.cat(x).float().double(), 2).numpy() for x in data]
        f = model.features(model.params, tests, 2).numpy()
    columns, known = [], np.zeros((9, 0))
    for own in stored:
        residual = own.T - known @ (known.T @ own.T) if score == "relevance" else own.T
        columns.append(np.linalg.svd(residual)[0][:, :2])
        known = np.concatenate([known, columns[-1]], axis=1)
    for task, mine in enumerate(columns):
        ours = server["core"][f"columns/{task}"].numpy()
        np.testing.assert_allclose(ours @ ours.T, mine @ mine.T, atol=1e-9)
    if score == "relevance":
        rms = [[np.sqrt(np.mean(np.sum((own @ b) ** 2, axis=1))) for b in columns[1:]] for own in stored]
        ours = references([server["core"][f"moments/{t}"] for t in range(3)],
                          [server["core"][f"columns/{t}"] for t in (1, 2)])  # fmt: skip
        np.testing.assert_allclose(ours.numpy(), rms, atol=1e-9)
        s = np.stack([np.linalg.norm(f @ b, axis=1) for b in columns[1:]], axis=1)
        cosines = [[np.dot(one, r) / np.linalg.norm(one) / np.linalg.norm(r) for r in rms] for one in s]
        expected = np.argmax(cosines, axis=1)
    else:
        expected = np.argmax([np.linalg.norm(f @ b, axis=1) for b in columns], axis=0)
    found = part.infer_task(server, tests, 2, model)
    assert found.tolist() == expected.tolist() and len(set(expected)) == 3


def test_columns_are_orthonormal_and_old_ones_stay_to_the_bit():
    model, part = _growing(toy.mlp(6, 12, 2)), TaskInference(core_columns=3)
    servers = [_collected(part, model, _data()[:count]) for count in (1, 2, 3)]
    core = servers[-1]["core"]
    joint = torch.cat([core[f"columns/{task}"] for task in range(3)], dim=1)
    assert joint.shape == (12, 9)
    torch.testing.assert_close(joint.T @ joint, torch.eye(9).double(), atol=1e-12, rtol=0)
    for server in servers[:-1]:
        assert all(torch.equal(core[name], leaf) for name, leaf in server["core"].items())


def test_a_task_takes_its_part_of_the_dimensions_at_most():
    for width, columns in ((12, 4), (2, 1)):  # 12 / 3 tasks; never none
        server = _collected(TaskInference(), _growing(toy.mlp(6, width, 2)), _data()[:1])
        assert server["core"]["columns/0"].shape == (width, columns)
    server = _collected(TaskInference(), _growing(toy.mlp(6, 12, 2)), [[toy.random(2, 6)]])
    assert server["core"]["columns/0"].shape == (12, 2)  # the features of two samples have no more directions


def test_rounding_of_the_sum_of_many_clients_is_no_direction():
    """Energies 1 and 1e-6: the rounding errors of a float32 sum are up to 1.2e-7 of one client, 4.5e-6 of 1,400."""
    part, model = TaskInference(core_columns=2), _plane(1)
    sums = {"features/moments": torch.tensor([1.0, 0.0, 1e-6]), "features/count": torch.tensor([1.0])}
    for expected, columns in ((1.0, 2), (1400.0, 1)):
        server = part.with_core({}, sums, replace(_round(model, 0), expected=expected))
        assert server["core"]["columns/0"].shape == (2, columns)


def test_samples_of_several_clients_are_those_of_one():
    model, part = _growing(toy.mlp(6, 9, 2)), TaskInference()
    several = _collected(part, model, _data())["core"]
    one = _collected(part, model, [[torch.cat(clients)] for clients in _data()])["core"]
    for task in range(3):
        torch.testing.assert_close(several[f"moments/{task}"], one[f"moments/{task}"], atol=1e-12, rtol=0)


# --- when nothing is inferred ----------------------------------------------------------------------------------------


def test_nothing_is_inferred_before_the_features_of_the_last_task_are_known():
    model, part = _growing(toy.mlp(6, 9, 2)), TaskInference()
    server = _collected(part, model, _data()[:2])
    x = torch.cat(_data()[0])
    assert part.infer_task(server, x, 2, model) is None  # as in an evaluation amid task 2
    assert part.infer_task({"params": model.params}, x, 0, model) is None
    assert part.infer_task(server, x, 1, model) is not None


def test_a_task_whose_round_was_aborted_is_never_inferred():
    model, part = _growing(toy.mlp(6, 9, 2)), TaskInference(score="share")
    server = _collected(part, model, _data())
    core = {name: leaf for name, leaf in server["core"].items() if not name.endswith("/1")}
    found = part.infer_task({**server, "core": core}, torch.cat([torch.cat(x) for x in _data()]), 2, model)
    assert set(found.tolist()) == {0, 2}


def test_clients_send_nothing_where_no_head_grows_or_the_option_is_off():
    model = cfl.Model(toy.mlp(6, 9, 2), (6,), (2,) * 3, multi_head=True)
    assert TaskInference().feature_sums(model.params, _client(_data()[0][0], 0), _round(model, 0)) == {}
    off, grown = OptionalTaskInference(), _growing(toy.mlp(6, 9, 2))
    assert off.feature_sums(grown.params, _client(_data()[0][0], 0), _round(grown, 0)) == {}
    assert off.feature_phases() == [] and len(OptionalTaskInference(infer_tasks=True).feature_phases()) == 1


@pytest.mark.parametrize("method", [FOT, GPM])
def test_the_option_is_said_to_have_no_effect_where_the_scenario_gives_the_task(method):
    line = "strategy.infer_tasks=true has no effect without scenario=class"
    fixed = cfl.Model(toy.mlp(6, 9, 2), (6,), (2,) * 3, multi_head=True)
    cases = ((True, fixed), (False, fixed), (True, _growing(toy.mlp(6, 9, 2))))
    assert [line in method(infer_tasks=on).notes(model) for on, model in cases] == [True, False, False]


@pytest.mark.parametrize("method", ["fot", "gpm"])
def test_a_run_without_the_option_is_as_before_and_with_scenario_task_only_a_broadcast_more(method):
    def run(*options):
        return cfl.run(toy.config(*options, method=method), stream=toy.stream(multi_head=True))

    off, on = run(), run("strategy.infer_tasks=true")
    assert all(torch.equal(on.params[name], leaf) for name, leaf in off.params.items())
    parameters = 8 * 6 + 6 + 6 * 6 + 6 + 6 * 2 + 2
    assert on.metrics["bytes_by_phase"].pop("features") == {"up": 0, "down": 3 * 4 * 4 * parameters}
    assert on.metrics["bytes_by_phase"] == off.metrics["bytes_by_phase"]
    assert "task_accuracy" not in on.metrics


@pytest.mark.parametrize("method", ["fot", "gpm", "fedprotip"])
@pytest.mark.parametrize("level", ["client", "example"])
def test_differential_privacy_is_refused(method, level):
    own = [] if method == "fedprotip" else ["strategy.infer_tasks=true"]
    with pytest.raises(ConfigError, match="second moments of features"):
        toy.config(*own, f"dp.level={level}", "dp.clip=1", "dp.noise_multiplier=1", method=method)


# --- runs ------------------------------------------------------------------------------------------------------------

CLASS = ("scenario=class", "class_loss=current", "cohort=4", "local.lr=0.1", "model.hidden=[64]")


def _run(strategy, *options, **more):
    config = toy.config(*CLASS, *options, method="fedavg")
    return cfl.run(config, stream=toy.stream(train=160, test=100, multi_head=True), strategy=strategy, **more)


def _blind(base):
    """The strategy without its inference: it predicts among all classes."""

    @dataclass(frozen=True)
    class Blind(base):
        def infer_task(self, server, x, task, model):
            return None

    return Blind


@pytest.mark.parametrize(
    "strategy", [FOT(infer_tasks=True), GPM(infer_tasks=True), FedProTIP(score="share")], ids=lambda s: type(s).__name__
)
def test_tasks_on_their_own_axes_are_told_apart(strategy):
    # Class means are sqrt(2) apart, and noise has a deviation of 0.3 on each axis: a sample is nearer to one of four
    # means of other tasks with probability below 4 P(z > sqrt(2) / 0.6) = 0.04, so 0.96 is about the best.
    found = _run(strategy).metrics
    options = {field.name: getattr(strategy, field.name) for field in fields(strategy)}
    without = _run(_blind(type(strategy))(**options)).metrics
    assert found["by_task"][-1]["task_accuracy"] == found["task_accuracy"] > 0.9
    assert found["acc"] > without["acc"] + 0.02  # seed 0: 0.93 against 0.81 for FOT
    assert "task_accuracy" not in without


def test_relevance_is_better_than_a_guess():
    # One sample alone says less than the paper's batch of 64 from one task. A guess is right in a third of the cases.
    assert _run(FedProTIP()).metrics["task_accuracy"] > 0.5


@pytest.mark.parametrize("strategy", INFERRING, ids=lambda s: type(s).__name__)
def test_secure_sums_are_the_plain_ones(strategy):
    # Fixed-point numbers have 24 bits behind the binary point; the sums of three rounds differ by rounding alone.
    plain, secure = (_run(strategy, f"secagg={kind}", "tasks=2") for kind in ("none", "full"))
    for name, leaf in plain.params.items():
        torch.testing.assert_close(secure.params[name], leaf, atol=1e-4, rtol=0)
    assert secure.metrics["task_accuracy"] == pytest.approx(plain.metrics["task_accuracy"], abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", INFERRING, ids=lambda s: type(s).__name__)
def test_conformance(strategy):
    check_strategy(strategy, config=toy.config("scenario=class", "tasks=2", "rounds=1", method="fedavg"))


@pytest.mark.parametrize("folded", [True, False])
@pytest.mark.parametrize("strategy", INFERRING, ids=lambda each: type(each).__name__)
def test_a_last_layer_whose_rows_are_no_samples_is_refused_at_the_start(strategy, folded):
    """The sum of f f^T would count positions as samples, and `infer_task` return a task for each of them."""
    module = toy.ManyRows(6, 2, folded=folded)
    model = _growing(module)
    with pytest.raises(ConfigError, match="tasks are inferred from .*; let the inputs of that layer, 'head', have the"):
        strategy.init_server(model.params, model)
    plain = cfl.Model(module, (6,), (2,) * 3, multi_head=True)  # nothing is inferred
    assert strategy.init_server(plain.params, plain) is not None
