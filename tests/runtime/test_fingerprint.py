"""What a run may not change between a kill and its resume, and what it may."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor, nn

import cfl
from cfl.assembly.resolve import dump
from cfl.config.schema import ModelConfig, RunConfig
from cfl.contract import Ctx
from cfl.core import CheckpointError, Tree, plugins
from cfl.runtime import checkpoint
from cfl.runtime.fingerprint import code, decisive
from cfl.runtime.sinks import NullSink
from cfl.streams.benchmark import Benchmark
from tests import toy


class Killed(BaseException):
    """Stands for SIGKILL."""


class Sink(NullSink):
    """Kills the run when two rounds are done; keeps the warnings."""

    def __init__(self, kill: bool) -> None:
        self.kill, self.warnings = kill, list[str]()

    def round(self, row: dict) -> None:
        if self.kill and row["rounds_done"] == 2:
            raise Killed

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def killed(folder: Path, config: RunConfig | None = None, **given) -> None:
    with pytest.raises(Killed):
        cfl.run(config or plain(), output=folder, sink=Sink(True), **{"stream": toy.stream(), **given})


def resumed(folder: Path, config: RunConfig | None = None, **given) -> list[str]:
    """Resume the run, and return its warnings."""
    sink = Sink(False)
    result = cfl.run(config or plain(), output=folder, resume=True, sink=sink, **{"stream": toy.stream(), **given})
    whole = cfl.run(config or plain(), **{"stream": toy.stream(), **given})
    assert all(leaf.equal(result.params[name]) for name, leaf in whole.params.items())
    return sink.warnings


def plain(*options: str, method: str = "fedavg") -> RunConfig:
    return toy.config("rounds=1", *options, method=method)


def data(change: Callable[[int, list[Tensor]], None]) -> cfl.streams.Stream:
    """Three tasks of the same numbers; change: writes to the tensors of a task."""
    parts = []
    for number in range(3):
        draws = torch.Generator().manual_seed(number)
        x, y = torch.randn(60, 8, generator=draws), torch.arange(60) % 2
        parts.append([x[:48].clone(), y[:48].clone(), x[48:].clone(), y[48:].clone()])
        change(number, parts[-1])
    return cfl.from_tensors([tuple(part) for part in parts])


def same(number: int, parts: list[Tensor]) -> None:
    """Change nothing."""


def one_number(number: int, parts: list[Tensor]) -> None:
    if number == 1:
        parts[0][7, 3] += 1


def one_test_label(number: int, parts: list[Tensor]) -> None:
    if number == 2:
        parts[3][5] = 1 - parts[3][5]


@pytest.mark.parametrize(("change", "task"), [(one_number, 1), (one_test_label, 2)])
def test_other_data_of_the_same_shapes_are_refused(change, task, tmp_path):
    killed(tmp_path, stream=data(same))
    with pytest.raises(CheckpointError, match=f"choose another --output.*the data of task 'task {task}' changed since"):
        resumed(tmp_path, stream=data(change))
    assert resumed(tmp_path, stream=data(same)) == []


def test_public_data_count_if_the_method_reads_them(tmp_path):
    stream = toy.stream()
    other = replace(stream, public=replace(stream.public, index=stream.public.index.flip(0)))
    killed(tmp_path / "plain")
    resumed(tmp_path / "plain", stream=other)
    config = plain("public.name=stream", method="feddf")
    killed(tmp_path / "public", config)
    with pytest.raises(CheckpointError, match="the public data changed since the run began"):
        resumed(tmp_path / "public", config, stream=other)


def net(activation: type[nn.Module], dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), activation(), nn.Dropout(dropout), nn.Linear(6, 2))


def test_another_network_of_the_same_shapes_is_refused(tmp_path):
    killed(tmp_path, model=net(nn.ReLU))
    for other in (net(nn.Tanh), net(nn.ReLU, dropout=0.5)):
        with pytest.raises(CheckpointError, match="the network changed since the run began"):
            resumed(tmp_path, model=other)
    # a fresh one: its initial weights are those of the checkpoint
    cfl.run(plain(), stream=toy.stream(), model=net(nn.ReLU), output=tmp_path, resume=True)


def scaled(factor: float) -> type[cfl.Strategy]:
    class Scaled(cfl.Strategy):
        """Changes gradients by a number that is neither an option nor in its source."""

        def adjust(self, grads: Tree, params: Tree, ctx: Ctx) -> Tree:
            return {name: factor * leaf for name, leaf in grads.items()}

    return Scaled


def test_other_hooks_of_the_same_name_are_refused(tmp_path):
    killed(tmp_path, strategy=scaled(0.5)())
    with pytest.raises(CheckpointError, match=r"the code of tests\..*Scaled changed since the run began"):
        resumed(tmp_path, strategy=scaled(2.0)())
    assert resumed(tmp_path, strategy=scaled(0.5)()) == []


def regularizer(factor: float) -> type[cfl.LocalRegularizer]:
    class Mine(cfl.LocalRegularizer):
        def penalty(self, params: Tree, logits: Tensor, ctx: Ctx) -> float:
            return factor

    return Mine


def network(factor: float) -> Callable[..., nn.Module]:
    return lambda input_shape, outputs: nn.Sequential(nn.Linear(*input_shape, outputs), nn.Softplus(factor))


def benchmark(shift: float) -> Benchmark:
    return Benchmark(lambda tasks, seed, data_root, download, class_order: data(lambda *_: shift), "mine", "none")


@pytest.mark.parametrize(
    ("registry", "make", "name", "options"),
    [
        (plugins.local, regularizer, "regularizer 'mine'", {"regularizers": {"mine": {}}}),
        (plugins.models, network, "model 'mine'", {"model": ModelConfig(name="mine")}),
        (plugins.benchmarks, benchmark, "benchmark 'mine'", {"benchmark": "mine"}),
    ],
    ids=["regularizer", "model", "benchmark"],
)
def test_the_code_of_each_plug_in_that_a_configuration_names_counts(registry, make, name, options, monkeypatch):
    """Else `cfl-run compare` would take the results of the former code for those of the present one."""
    config, found = plain().model_copy(update=options), []
    for value in (1.0, 2.0, 1.0):
        monkeypatch.setitem(registry._items, "mine", make(value))
        found.append(code(config))
    assert [*found[0]] == [*found[1]] == [f"the code of {name}"]  # all else is of `cfl` itself
    assert found[0] == found[2] != found[1]


def test_a_checkpoint_that_is_being_written_is_no_model_to_start_from(tmp_path):
    """Its file may be there alone: the run was killed in its first write."""
    part = tmp_path / "checkpoints" / "checkpoint-000001.safetensors.tmp"
    part.parent.mkdir()
    part.touch()
    assert code(plain(f"start={tmp_path}")) == {}


def test_one_folder_to_start_from_and_of_weights_is_hashed_by_its_checkpoints(tmp_path):
    """A run with both starts from the checkpoints."""
    cfl.run(plain(), stream=toy.stream(), output=tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"exported")
    start = plain(f"start={tmp_path}")
    both = start.model_copy(update={"model": ModelConfig(weights=str(tmp_path))})
    assert code(both) == code(start) and list(code(start)) == [f"the model in '{tmp_path}'"]


def test_a_network_of_a_plug_in_with_other_code_is_refused(tmp_path, monkeypatch):
    """Its parameters have the same names and shapes."""
    config = plain().model_copy(update={"model": ModelConfig(name="mine")})
    monkeypatch.setitem(plugins.models._items, "mine", network(1.0))
    killed(tmp_path, config)
    monkeypatch.setitem(plugins.models._items, "mine", network(2.0))
    with pytest.raises(CheckpointError, match="the code of model 'mine' changed since the run began"):
        resumed(tmp_path, config)
    monkeypatch.setitem(plugins.models._items, "mine", network(1.0))
    assert resumed(tmp_path, config) == []


@dataclass(frozen=True)
class Options(cfl.Strategy):
    """A strategy whose options are no plain data."""

    shape: Callable = field(default=torch.relu)
    table: Tensor = field(default_factory=lambda: torch.zeros(2000))


def power(number: float) -> Callable[[float], float]:
    return lambda x: x**number


def test_options_that_are_functions_and_tensors_are_compared_by_content(tmp_path):
    table = torch.zeros(2000)
    table[1000] = 1  # where repr has dots
    killed(tmp_path, strategy=Options(power(2), table))
    assert resumed(tmp_path, strategy=Options(power(2), table.clone())) == []
    for other, name in ((Options(power(3), table), "shape"), (Options(power(2), 2 * table), "table")):
        with pytest.raises(CheckpointError, match=f"strategy.{name} changed since the run began"):
            resumed(tmp_path, strategy=other)


def test_options_of_a_shipped_method_given_as_an_object_are_compared(tmp_path):
    """config.yaml says fedavg, without options: only the hashes tell."""
    fot = plugins.strategies.get("fot")
    killed(tmp_path, strategy=fot(threshold=0.9))
    with pytest.raises(CheckpointError, match="strategy.threshold changed since the run began"):
        resumed(tmp_path, strategy=fot(threshold=0.5))


def test_regularizer_objects_in_another_order_are_refused(tmp_path):
    """The `around` of the last one is outermost, so the order changes results; config.yaml names no objects."""
    own = {name: plugins.local.get(name)() for name in ("fedsam", "fedsol")}
    killed(tmp_path, regularizers=own)
    with pytest.raises(CheckpointError, match="the list of methods changed since the run began"):
        resumed(tmp_path, regularizers={name: own[name] for name in ("fedsol", "fedsam")})


def test_where_processes_run_does_not_count(tmp_path):
    """A run may go on with another number of workers, and with another cluster."""
    killed(tmp_path)
    assert resumed(tmp_path, plain("workers=3", "flower.address=in-process")) == []


def test_an_option_is_named_first(tmp_path):
    killed(tmp_path)
    with pytest.raises(CheckpointError, match=r"local.lr=0.05 there, local.lr=0.5 here"):
        resumed(tmp_path, plain("local.lr=0.5"), stream=data(same))


def test_the_version_of_cfl_is_no_part_of_it(tmp_path, monkeypatch):
    """Nor is the source of what `cfl` defines: an upgrade continues a run."""
    killed(tmp_path, plain(method="fot"))
    text = (tmp_path / "made_of.json").read_text()
    assert "code" not in json.loads(text)["run"] and json.loads(text)["code"] == {}
    assert not re.search("the code of", text)
    monkeypatch.setattr(cfl, "__version__", "99.0")
    resumed(tmp_path, plain(method="fot"))


def as_of_version_0_1(folder: Path, config: RunConfig, missing: str) -> None:
    """Make a folder what it was before there were hashes of data, network and code. missing: an option of today."""
    options = {name: value for name, value in dump(config).items() if name not in ("workers", missing)}
    given = {
        "hooks": {"strategy": "Strategy()"},
        "params": {name: list(leaf.shape) for name, leaf in net_of_the_toy_run().items()},
        "tasks": [(f"task {number}", 48, 40) for number in range(3)],
    }
    (folder / "made_of.json").unlink()
    (folder / "config.yaml").write_text(yaml.safe_dump({**options, "workers": None}))
    trees, meta = checkpoint.load_latest(folder / "checkpoints", last_fingerprint(folder), pytest.fail)
    checkpoint.clear(folder / "checkpoints")
    old = checkpoint.fingerprint({**options, "given": given})
    checkpoint.save(folder / "checkpoints", meta["position"], trees, {**meta, "fingerprint": old})


def net_of_the_toy_run() -> Tree:
    return cfl.run(plain(), stream=toy.stream()).params


def last_fingerprint(folder: Path) -> str:
    """The fingerprint in the last checkpoint, from its bytes."""
    raw = max((folder / "checkpoints").glob("checkpoint-*.safetensors")).read_bytes()
    return re.search(rb'\\"fingerprint\\":\\"([0-9a-f]{64})', raw)[1].decode()


class Keeps(nn.Module):
    """Keeps what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.inner(x)
        return self.last


@pytest.mark.parametrize("engine", ["loop", "vmapped"])
def test_what_a_network_keeps_from_its_forward_does_not_count(engine, tmp_path):
    """A fresh object has other initial weights, so it keeps other numbers. The run goes on from the checkpoint."""
    config, first = plain(f"engine={engine}"), Keeps()
    killed(tmp_path, config, model=first)
    whole = cfl.run(config, stream=toy.stream(), model=first)
    again = cfl.run(config, stream=toy.stream(), output=tmp_path, resume=True, sink=Sink(False), model=Keeps())
    assert all(leaf.equal(again.params[name]) for name, leaf in whole.params.items())


def test_the_number_of_tasks_of_the_users_own_stream_is_recorded(tmp_path):
    """The preset's number is for the benchmark's own stream."""
    few = ["rounds=1", "cohort=2", "partition.clients=2"]
    result = cfl.run(cfl.resolve("permuted-digits", overrides=few), stream=toy.stream(2), output=tmp_path)
    assert len(result.accuracy_matrix) == 2
    assert yaml.safe_load((tmp_path / "config.yaml").read_text())["tasks"] is None


def test_all_options_but_two_decide_whether_a_run_resumes():
    options = dump(toy.config())
    other = {"attack": {"name": "ipm"}, "secure": {"bits": 1}, "model": {"name": "other"}}
    same = {name for name in options if decisive({**options, name: other.get(name, "other")}) == decisive(options)}
    assert same == {"workers", "flower"}
