"""The round loop: what is counted, sampled, evaluated and refused."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from torch import nn

import cfl
from cfl.assembly import methods
from cfl.core import ConfigError, DataError, UpdateError, rng, tree
from cfl.methods.regularizers import FedProx, LocalRegularizer
from cfl.methods.strategies import FOT
from cfl.runtime.builder import build_session
from cfl.runtime.sinks import NullSink
from tests import toy


class Recorder(NullSink):
    """Keeps the rows that a run reports."""

    def __init__(self) -> None:
        self.rows: list[dict] = []
        self.notes: list[str] = []

    def start(self, config: cfl.RunConfig, notes: list[str], total_rounds: int) -> None:
        self.notes += notes

    def round(self, row: dict) -> None:
        self.rows.append(row)

    def warn(self, text: str) -> None:
        self.notes.append(text)


def test_the_same_run_twice_gives_the_same_weights_and_another_seed_does_not() -> None:
    first, again, other = (cfl.run(toy.config(f"seed={seed}"), stream=toy.stream()) for seed in (0, 0, 1))
    assert all(leaf.equal(again.params[name]) for name, leaf in first.params.items())
    assert not all(leaf.equal(other.params[name]) for name, leaf in first.params.items())


def test_global_random_state_is_neither_read_nor_changed() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = cfl.run(toy.config("model.dropout=[0.5,0.5]"), stream=toy.stream())
    assert torch.get_rng_state().equal(before)
    torch.manual_seed(6)
    second = cfl.run(toy.config("model.dropout=[0.5,0.5]"), stream=toy.stream())
    assert all(leaf.equal(second.params[name]) for name, leaf in first.params.items())


@dataclass(frozen=True)
class Alone(cfl.Strategy):
    """Each client keeps its own model, and sends nothing."""

    def init_client(self, params, model):
        return params

    def finish(self, params, ctx, steps):
        return {}, params


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("secagg=full",),
        ("engine=pool", "workers=1"),
        ("secagg=sum", "engine=pool", "workers=1", "agg.weights=uniform"),
        ("dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson"),
    ],
    ids="+".join,
)
def test_clients_that_send_nothing_keep_their_states_and_leave_the_global_model_as_it_is(options: tuple) -> None:
    sink, config = Recorder(), toy.config(*options, method="fedavg")
    session = build_session(config, toy.stream(1), {"strategy": Alone()}, None, None, sink)
    with contextlib.closing(session):
        session.start(resume=False)
        before = tree.clone(session.state.server["params"])
        for position in range(len(session.schedule)):
            session.round(position)
    assert [row["aborted"] for row in sink.rows] == [None] * len(session.schedule)
    assert all(leaf.equal(before[name]) for name, leaf in session.state.server["params"].items())
    assert session.state.clients
    for state in session.state.clients.values():
        assert not any(leaf.equal(before[name.removeprefix("strategy/")]) for name, leaf in state.items())


def test_an_object_of_ones_own_is_named_by_its_class_in_the_results_and_a_method_by_its_option() -> None:
    config = toy.config("rounds=1", method="fedprox")
    members = {**methods.build(config), "strategy": Alone()}
    with contextlib.closing(build_session(config, toy.stream(1), members)) as session:
        assert session.rounds.label == "Alone+fedprox"


@pytest.mark.parametrize(("engine", "used"), [("auto", "loop"), ("vmapped", "vmapped")])
def test_without_a_client_in_any_cohort_no_engine_is_measured(engine: str, used: str, tmp_path: Path) -> None:
    options = ("tasks=1", "rounds=1", "partition.clients=10", "cohort=1", "sampling=poisson", "seed=0")
    sink = Recorder()
    config = toy.config(f"engine={engine}", *options, method="fedavg")
    cfl.run(config, stream=toy.stream(1), output=tmp_path, sink=sink)
    assert [(row["clients"], row["aborted"]) for row in sink.rows] == [(0, "no client of the cohort has answered")]
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["engine"] == used


def test_one_task_makes_orthogonal_training_plain_averaging_to_the_bit() -> None:
    runs = [cfl.run(toy.config(method=method), stream=toy.stream(tasks=1)) for method in ("fot", "fedavg")]
    assert all(leaf.equal(runs[1].params[name]) for name, leaf in runs[0].params.items())
    assert runs[0].metrics["fgt"] is None


def test_bytes_are_those_of_the_trees_that_travel() -> None:
    """MLP 8-6-6-2 with biases: (8+1)6 + (6+1)6 + (6+1)2 = 110 float32 parameters, each way for each of 3 clients."""
    sink = Recorder()
    result = cfl.run(toy.config(), stream=toy.stream(), sink=sink)
    model = 4 * 110
    trains = [row for row in sink.rows if row["phase"] == "train"]
    assert {(row["bytes_up"], row["bytes_down"]) for row in trains} == {(3 * model, 3 * model)}
    # GPSE, all 4 owners, d = 9, 7, 7 with the bias: sketches d x 5d in float32 and two float64 energies a layer go up;
    # the model and the (still empty) bases come down.
    gpse = next(row for row in sink.rows if row["phase"] == "gpse")
    assert gpse["bytes_up"] == 4 * (4 * 5 * (9 * 9 + 7 * 7 + 7 * 7) + 3 * 16)
    assert gpse["bytes_down"] == 4 * model
    assert all(row["bytes_up"] == row["bytes_down"] == 0 for row in sink.rows if row["phase"] == "coverage")
    assert result.metrics["bytes_up"] == sum(row["bytes_up"] for row in sink.rows)


def test_the_accuracy_matrix_is_that_of_the_global_model() -> None:
    result = cfl.run(toy.config("eval_batch_size=7"), stream=toy.stream())
    part = toy.stream().tasks[0].test
    x, y = part.gather(torch.arange(len(part)))
    result.model.module.eval()
    with torch.no_grad():
        correct = (result.model.logits(result.params, x, 0).argmax(1) == y).float().mean()
    assert result.accuracy_matrix[-1, 0] == pytest.approx(float(correct))
    assert np.isnan(result.accuracy_matrix[0, 1]) and result.metrics["accuracy_matrix"][0][1:] == [None, None]


def test_cohorts_have_the_configured_size_and_reach_every_owner() -> None:
    seen: set[int] = set()

    @dataclass(frozen=True)
    class Watch(cfl.Strategy):
        def broadcast(self, server, info):  # noqa: ANN001, ANN202
            assert len(info.clients) == 3 and list(info.clients) == sorted(set(info.clients))
            seen.update(info.clients)
            return super().broadcast(server, info)

    cfl.run(toy.config("rounds=8"), stream=toy.stream(), strategy=Watch())
    assert seen == {0, 1, 2, 3}


def test_rounds_a_task_and_learning_rate_schedule() -> None:
    sink = Recorder()
    options = ("rounds=[1,3,2]", "local.lr=0.1", "local.lr_decay=0.5")
    cfl.run(toy.config(*options, method="fedavg"), stream=toy.stream(), sink=sink)
    # lr 0.1 halves after each round and starts again with each task
    assert [(row["task"], row["lr"]) for row in sink.rows] == [
        (0, 0.1), (1, 0.1), (1, 0.05), (1, 0.025), (2, 0.1), (2, 0.05),
    ]  # fmt: skip
    sink = Recorder()
    cfl.run(toy.config(*options, "local.lr_restart=false", method="fedavg"), stream=toy.stream(), sink=sink)
    assert [row["lr"] for row in sink.rows] == [0.1 * 0.5**i for i in range(6)]
    with pytest.raises(ConfigError, match="2 numbers for 3 tasks"):
        cfl.run(toy.config("tasks=null", "rounds=[1,3]"), stream=toy.stream())


def test_state_follows_the_client_and_leaves_absent_ones_alone() -> None:
    @dataclass(frozen=True)
    class Counts(LocalRegularizer):
        def init_client(self, params, model):  # noqa: ANN001, ANN202
            return {"rounds": torch.zeros(())}

        def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
            return {"rounds": ctx.state["rounds"] + 1}, {"rounds": ctx.state["rounds"] + 1}

    took_part: dict[int, int] = {}
    uploads: list[float] = []

    @dataclass(frozen=True)
    class Watch(cfl.Strategy):
        def absorb(self, server, mean, info, lr):  # noqa: ANN001, ANN202
            for id in info.clients:
                took_part[id] = took_part.get(id, 0) + 1
            uploads.append((float(mean["counts"]["rounds"]), np.mean([took_part[id] for id in info.clients])))
            return super().absorb(server, mean, info, lr)

    config = toy.config("rounds=9", "tasks=1", "cohort=2")
    cfl.run(config, stream=toy.stream(tasks=1), strategy=Watch(), regularizers={"counts": Counts()})
    assert len(uploads) == 9
    # every client holds 12 samples, so the weighted mean of the counters is the plain mean of how often each took part
    assert all(mean == pytest.approx(expected) for mean, expected in uploads)


def test_a_state_that_a_hook_clears_stays_cleared() -> None:
    seen: list[dict] = []

    @dataclass(frozen=True)
    class Clears(LocalRegularizer):
        def init_client(self, params, model):  # noqa: ANN001, ANN202
            return {"fresh": torch.ones(())}

        def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
            seen.append(dict(ctx.state))
            return {}, {}

    config = toy.config("tasks=1", "rounds=3", "cohort=4", method="fedavg")
    cfl.run(config, stream=toy.stream(tasks=1), regularizers={"clears": Clears()})
    assert [len(state) for state in seen] == [1] * 4 + [0] * 8  # four clients, three rounds


def test_hooks_know_the_learning_rate_and_the_population() -> None:
    rates, rounds = [], []

    @dataclass(frozen=True)
    class Notes(cfl.Strategy):
        def adjust(self, grads, params, ctx):  # noqa: ANN001, ANN202
            rates.append(ctx.lr)
            return grads

        def absorb(self, server, mean, info, lr):  # noqa: ANN001, ANN202
            rounds.append((info.lr, info.population))
            return super().absorb(server, mean, info, lr)

    config = toy.config("tasks=1", "rounds=2", "local.lr=0.1", "local.lr_decay=0.5", method="fedavg")
    cfl.run(config, stream=toy.stream(tasks=1), strategy=Notes())
    assert rounds == [(0.1, 4), (0.05, 4)]
    assert rates == [0.1] * 9 + [0.05] * 9  # three clients with 12 samples in batches of 4


def test_objects_with_values_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy\.threshold must be a number in \(0, 1\], not 2\.0"):
        cfl.run(toy.config(), stream=toy.stream(), strategy=FOT(threshold=2.0))
    with pytest.raises(ConfigError, match=r"regularizer\.near\.mu must be a number in \[0, inf\), not -1\.0"):
        cfl.run(toy.config(), stream=toy.stream(), regularizers={"near": FedProx(mu=-1.0)})


def test_seconds_are_those_of_clients_of_the_server_and_of_measuring(tmp_path) -> None:  # noqa: ANN001
    result = cfl.run(toy.config(), stream=toy.stream(), output=tmp_path)
    spent = json.loads((tmp_path / "timing.json").read_text())
    assert set(spent["clients"]) == set(spent["server"]) == {"train", "gpse"}
    assert set(spent["measurement"]) == {"coverage", "evaluate", "checkpoint"}
    total = sum(seconds for kind in spent.values() for seconds in kind.values())
    assert result.metrics["seconds"] == pytest.approx(total) and total > 0
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    for phase in ("train", "gpse"):
        own = sum(row["seconds"] for row in rows if row["phase"] == phase)
        assert own == pytest.approx(spent["clients"][phase] + spent["server"][phase]) and spent["server"][phase] > 0


def test_a_sink_hears_of_clients_without_data_and_of_each_task_by_its_name() -> None:
    """Half of four clients hold each task."""
    told: list[dict] = []

    class Told(Recorder):
        def task(self, row: dict) -> None:
            told.append(row)

    sink, stream = Told(), toy.stream()
    config = toy.config("partition.task_share=0.5", "rounds=1", method="fedavg")
    result = cfl.run(config, stream=stream, sink=sink)
    assert "clients without data are never sampled: task 0: 2, task 1: 2, task 2: 2" in sink.notes
    assert [(row["task"], row["name"]) for row in told] == [(n, task.name) for n, task in enumerate(stream.tasks)]
    assert told[1]["accuracy"] == [*result.accuracy_matrix[1, :2].tolist(), None]


def test_nan_is_named_or_left_out() -> None:
    @dataclass(frozen=True)
    class Breaks(cfl.Strategy):
        def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
            upload, state = super().finish(params, ctx, steps)
            bad = tree.scale(upload, float("nan"))
            return (bad if ctx.key % 3 == 0 else upload), state

    with pytest.raises(UpdateError, match=r"client \d .*task 0, phase train, round \d.*on_bad_update=exclude"):
        cfl.run(toy.config("rounds=5"), stream=toy.stream(), strategy=Breaks())
    sink = Recorder()
    config = toy.config("rounds=5", "on_bad_update=exclude")
    result = cfl.run(config, stream=toy.stream(), strategy=Breaks(), sink=sink)
    assert tree.all_finite(result.params)
    assert any(row["excluded"] for row in sink.rows)
    assert sum(len(row["excluded"]) for row in sink.rows) == sum("excluded" in note for note in sink.notes)


def test_bad_input_is_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"local.batch_size=16 .* 12 samples .*at most 12"):
        cfl.run(toy.config("local.batch_size=16"), stream=toy.stream())
    with pytest.raises(DataError, match="49"):
        cfl.run(toy.config("partition.clients=49"), stream=toy.stream())
    with pytest.raises(ConfigError, match=r"2 outputs, but the stream has 3"):
        parts = [(torch.randn(12, 8), torch.arange(12) % 3, torch.randn(6, 8), torch.arange(6) % 3)]
        cfl.run(toy.config(), stream=cfl.from_tensors(parts), model=nn.Linear(8, 2))
    with pytest.raises(ConfigError, match="no GPU"):
        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
        cfl.run(toy.config("device=cuda"), stream=toy.stream())


def test_a_module_of_ones_own_runs_on_a_multi_head_stream() -> None:
    module = nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), nn.ReLU(), nn.Linear(5, 7))
    before = {name: leaf.clone() for name, leaf in module.state_dict().items()}
    sink = Recorder()
    result = cfl.run(toy.config(), stream=toy.stream(multi_head=True), model=module, sink=sink)
    assert result.params["3.weight@2"].shape == (2, 5)  # the head has the task's 2 classes, not the module's 7
    assert any("0.weight+0.bias (d=9)" in note for note in sink.notes)
    assert any("frozen after the first task: 1.bias, 1.weight" in note for note in sink.notes)
    assert all(leaf.equal(before[name]) for name, leaf in module.state_dict().items())


@dataclass(frozen=True)
class Rounds(LocalRegularizer):
    """Counts rounds, on each client and on the server."""

    def init_client(self, params, model):  # noqa: ANN001, ANN202
        return {"rounds": torch.zeros(())}

    def init_shared(self, params, model):  # noqa: ANN001, ANN202
        return {"rounds": torch.zeros(())}

    def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
        return {}, {"rounds": ctx.state["rounds"] + 1}

    def server_step(self, step, own, gathered, params, info):  # noqa: ANN001, ANN202
        return step, {"rounds": own["rounds"] + 1}


@dataclass(frozen=True)
class Lasting(cfl.Strategy):
    """A strategy that counts rounds likewise."""

    def init_client(self, params, model):  # noqa: ANN001, ANN202
        return {"rounds": torch.zeros(())}

    def init_server(self, params, model):  # noqa: ANN001, ANN202
        return {"count": {"rounds": torch.zeros(())}}

    def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
        upload, state = super().finish(params, ctx, steps)
        return upload, {"rounds": state["rounds"] + 1}

    def absorb(self, server, mean, info, lr):  # noqa: ANN001, ANN202
        new = super().absorb(server, mean, info, lr)
        return {**new, "count": {"rounds": server["count"]["rounds"] + 1}}


def test_what_regularizers_keep_begins_anew_with_each_task_and_what_strategies_keep_stays() -> None:
    config = toy.config("rounds=4", "cohort=2", method="fedavg")
    members = {"strategy": Lasting(), "rounds": Rounds()}
    session = build_session(config, toy.stream(), members)
    took_part = {(task, id): 0 for task in range(3) for id in range(4)}
    for position in range(3 * 4):
        task, number = divmod(position, 4)
        for id, state in session.prepare(position).states.items():
            assert state["rounds/rounds"].item() == took_part[task, id]
            assert state["strategy/rounds"].item() == sum(took_part[earlier, id] for earlier in range(task + 1))
            took_part[task, id] += 1
        if position:
            assert ("local/rounds" in session.state.server) == (number > 0)
        session.round(position)
        assert session.state.server["count"]["rounds"].item() == position + 1
        if number < 3:
            assert session.state.server["local/rounds"]["rounds"].item() == number + 1
    assert any(took_part[0, id] and took_part[1, id] for id in range(4))  # someone came back in another task


def test_the_server_half_hears_of_those_whose_uploads_count() -> None:
    @dataclass(frozen=True)
    class Breaks(cfl.Strategy):
        def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
            upload, state = super().finish(params, ctx, steps)
            return tree.scale(upload, torch.where(ctx.client == 2, float("nan"), 1.0)), state

    counts: list[tuple] = []

    @dataclass(frozen=True)
    class Counts(LocalRegularizer):
        gathers = "sum"

        def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
            return {"one": torch.ones(())}, ctx.state

        def server_step(self, step, own, gathered, params, info):  # noqa: ANN001, ANN202
            counts.append((info.clients, info.population, gathered["one"].item()))
            return step, own

    config = toy.config("tasks=1", "rounds=2", "cohort=4", "on_bad_update=exclude", method="fedavg")
    stream, members = toy.stream(tasks=1), {"counts": Counts()}
    cfl.run(config, stream=stream, strategy=Breaks(), regularizers=members, sink=Recorder())
    assert counts == [((0, 1, 3), 4, 3.0)] * 2


@pytest.mark.parametrize("label", ["fedavg", "fot+moon", "scaffold"])
def test_looking_at_the_clients_models_cannot_change_the_run(label: str) -> None:
    def look(info, client, params) -> None:  # noqa: ANN001
        seen.append((info.task, info.round, client, tree.clone(params)))
        for leaf in params.values():
            leaf.zero_()
        torch.manual_seed(len(seen))

    seen: list[tuple] = []
    options = ("model.dropout=[0.5,0.5]", "local.momentum=0.9")
    plain = cfl.run(toy.config(*options, method=label), stream=toy.stream())
    state = torch.get_rng_state()
    looked = cfl.run(toy.config(*options, "eval_local=1", method=label), stream=toy.stream(), observe=look)
    torch.set_rng_state(state)
    assert all(leaf.equal(looked.params[name]) for name, leaf in plain.params.items())
    assert [entry[:2] for entry in seen] == [(task, number) for task in range(3) for number in (0, 1) for _ in range(3)]
    for key in ("acc", "bytes_up", "bytes_down", "client_bytes", "accuracy_matrix"):
        assert plain.metrics[key] == looked.metrics[key]


def test_observe_sees_each_clients_model() -> None:
    """With equal shares and weights the global model is their mean."""
    seen: dict[int, dict] = {}
    result = cfl.run(
        toy.config("tasks=1", "rounds=1", method="fedavg"),
        stream=toy.stream(tasks=1),
        model=toy.mlp(8, 5, 2),
        observe=lambda info, client, params: seen.update({client: params}),
    )
    assert len(seen) == 3 and list(seen) == sorted(seen)
    for name, leaf in result.params.items():
        models = [params[name] for params in seen.values()]
        assert torch.allclose(leaf, sum(models) / 3, atol=1e-13, rtol=0)
        assert not torch.equal(models[0], models[1])


def test_local_models_are_evaluated_every_so_many_rounds() -> None:
    sink, seen = Recorder(), {}

    def look(info, client, params) -> None:  # noqa: ANN001
        seen.setdefault((info.task, info.round), {})[client] = params

    config = toy.config("rounds=5", "eval_local=2", "local.lr=0.3", method="fot")
    result = cfl.run(config, stream=toy.stream(), sink=sink, observe=look)
    rows = [row for row in sink.rows if "local" in row]
    places = [(row["task"], row["phase"], row["round"]) for row in rows]
    assert places == [(task, "train", number) for task in range(3) for number in (1, 3)]
    for row in rows:
        test = toy.stream().tasks[row["task"]].test
        x, y = test.gather(torch.arange(len(test)))
        models = seen[row["task"], row["round"]]
        assert row["local"]["client"] == list(models)
        result.model.module.eval()
        for place, params in enumerate(models.values()):
            with torch.no_grad():
                right = (result.model.logits(params, x, row["task"]).argmax(1) == y).float().mean()
            assert row["local"]["accuracy"][place] == pytest.approx(float(right))
    assert result.metrics["local_accuracy"] == rows[-1]["local"]["accuracy"]  # when they were last looked at
    assert len(result.metrics["local_accuracy"]) == 3
    assert "local_accuracy" not in cfl.run(toy.config(method="fot"), stream=toy.stream()).metrics


def test_the_rounds_between_evaluations_of_local_models_are_counted_over_the_phases_of_a_task() -> None:
    """Of four training rounds the last is the phase train+gpse, but in the last task."""
    sink, local = Recorder(), ("strategy.model=local", "strategy.participants=sampled")
    cfl.run(toy.config("rounds=4", "eval_local=2", *local, method="fot"), stream=toy.stream(), sink=sink)
    places = [(row["task"], row["phase"], row["round"]) for row in sink.rows if "local" in row]
    second = {0: ("train+gpse", 0), 1: ("train+gpse", 0), 2: ("train", 3)}
    assert places == [(task, *place) for task in range(3) for place in (("train", 1), second[task])]


@pytest.mark.parametrize("scenario", ["task", "class"])
def test_a_note_names_a_head_of_a_single_class(scenario: str) -> None:
    x, y = torch.randn(12, toy.DIMENSIONS), torch.arange(12) % 2
    stream = cfl.from_tensors([(x, y, x, y), (x, 0 * y + 5, x, 0 * y + 5)], multi_head=True)
    config = toy.config("tasks=2", "local.batch_size=1", f"scenario={scenario}", method="fedavg")
    notes = build_session(config, stream, methods.build(config)).notes
    told = ["task 'classes 5' has a head of a single class, so its accuracy is 100 % whatever the model learns"]
    assert [note for note in notes if "single class" in note] == (told if scenario == "task" else [])


@pytest.mark.parametrize(
    ("method", "options", "told"),
    [
        ("fedavg", ["class_loss=current", "local.weight_decay=0.01"], True),
        ("fedavg", ["class_loss=current"], False),
        ("fedavg", ["local.weight_decay=0.01"], False),  # the loss has all classes
        ("fot", ["class_loss=current", "local.weight_decay=0.01"], False),  # old parts of the head are frozen
    ],
)
def test_a_note_says_that_weight_decay_alone_changes_old_classes(method: str, options: list, told: bool) -> None:
    config = toy.config("scenario=class", *options, method=method)
    notes = build_session(config, toy.stream(multi_head=True), methods.build(config)).notes
    assert any("local.weight_decay=0.01 shrinks the head's weights" in note for note in notes) == told


@pytest.mark.parametrize("name", ["eval_local", "eval_every"])
def test_a_note_says_that_no_evaluation_follows_without_local_training(name: str) -> None:
    """FedCIL trains its clients in `work`; FedAvg in a phase with train=True."""
    text = f"{name}=1 has no effect: 'fedcil' trains clients in `work` alone"
    for label, told in (("fedcil", [text]), ("fedavg", [])):
        config = toy.config(f"{name}=1", method=label)
        notes = build_session(config, toy.stream(), methods.build(config)).notes
        assert [note for note in notes if name in note] == told


@pytest.mark.parametrize(("every", "due"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3]), (9, [])])
def test_the_current_task_is_evaluated_every_so_many_rounds_and_at_its_end(every: int, due: list[int]) -> None:
    """No evaluation follows gpse; coverage is the last round of a task, but of the last, which has neither."""
    sink = Recorder()
    config = toy.config("rounds=5", f"eval_every={every}", method="fot")
    result = cfl.run(config, stream=toy.stream(), sink=sink)
    found = {(row["task"], row["phase"], row["round"]): row["accuracy"] for row in sink.rows}
    ends = [(0, "coverage", 0), (1, "coverage", 0), (2, "train", 4)]
    expected = {(task, "train", number) for task in range(3) for number in due} | {*ends}
    assert {place for place, accuracy in found.items() if accuracy is not None} == expected
    assert [found[end] for end in ends] == result.accuracy_matrix.diagonal().tolist()


@pytest.mark.parametrize("label", ["fedavg", "fot+moon"])
def test_a_look_at_local_models_counts_as_measurement(label: str, tmp_path, monkeypatch) -> None:  # noqa: ANN001
    """On a clock that only looking moves, nobody else spends time."""
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0])
    monkeypatch.setattr("cfl.runtime.recorder.time", clock)
    monkeypatch.setattr("cfl.engines.evaluate.time", clock)

    def look(info, client, params) -> None:  # noqa: ANN001
        now[0] += 100.0

    class Slow(Recorder):
        def start(self, config: cfl.RunConfig, notes: list[str], total_rounds: int) -> None:
            now[0] += 50.0

    sink = Slow()
    config = toy.config("eval_local=1", method=label)
    result = cfl.run(config, stream=toy.stream(), output=tmp_path, sink=sink, observe=look)
    spent = json.loads((tmp_path / "timing.json").read_text())
    assert spent["measurement"]["evaluate"] == 100.0 * 3 * 2 * 3  # tasks, rounds, clients
    assert not any(spent["clients"].values()) and not any(spent["server"].values())
    assert {row["seconds"] for row in sink.rows} == {0.0} and result.metrics["seconds"] == 1800.0


def test_augmentation_is_of_training_images_alone() -> None:
    """A run on images: with it clients see other images, tests and public data stay as they are."""
    seen: list[torch.Tensor] = []

    @dataclass(frozen=True)
    class Looks(LocalRegularizer):
        def augment(self, batch, ctx):  # noqa: ANN001, ANN202
            seen.append(batch.x)
            return batch

    x, y = torch.randn(24, 1, 4, 4, generator=rng.generator(3)), torch.arange(24) % 2
    stream = cfl.from_tensors([(x[:16], y[:16], x[16:], y[16:])])
    known = {tuple(image.flatten().tolist()) for image in x}
    for augment, changed in (("[]", False), ("[crop]", True)):
        seen.clear()
        config = toy.config("tasks=1", "partition.clients=2", f"local.augment={augment}", method="fedavg")
        result = cfl.run(config, stream=stream, regularizers={"looks": Looks()})
        images = [tuple(image.flatten().tolist()) for batch in seen for image in batch]
        assert len(images) == 2 * 2 * 8 and (not known.issuperset(images)) == changed
        result.model.module.eval()
        with torch.no_grad():
            right = (result.model.logits(result.params, x[16:], 0).argmax(1) == y[16:]).float().mean()
        assert result.accuracy_matrix[0, 0] == pytest.approx(float(right))


def test_public_data_are_stored_on_every_client_and_reach_those_who_ask() -> None:
    asked: list = []

    @dataclass(frozen=True)
    class Asks(LocalRegularizer):
        needs_public = True

        def finish(self, params, ctx, steps):  # noqa: ANN001, ANN202
            asked.append(ctx.public)
            return {}, ctx.state

        def server_step(self, step, own, gathered, params, info):  # noqa: ANN001, ANN202
            asked.append(info.public)
            return step, own

    stream, config = toy.stream(), toy.config(method="fedavg")
    without = cfl.run(config, stream=stream)
    result = cfl.run(config, stream=stream, regularizers={"asks": Asks()})
    assert all(len(public) == 20 and torch.equal(public.index, stream.public.index) for public in asked)
    # 20 samples of 8 float32 each; a stored sample counts with its int64 label
    assert result.metrics["client_bytes"] - without.metrics["client_bytes"] == 20 * (8 * 4)
