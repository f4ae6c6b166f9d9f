import json
import subprocess
import sys

import pytest

import cfl
from cfl.assembly.resolve import dump
from cfl.config.overrides import flat
from cfl.runtime.mlflow import MlflowSink
from cfl.runtime.sinks import Sinks
from tests import toy
from tests.runtime.test_resume import Killed, Stop

mlflow = pytest.importorskip("mlflow")
CONFIG = toy.config("eval_every=1", "checkpoint_every=2")


class Length(cfl.Callback):
    def on_round(self, view):
        return {"rounds": len(view.rows)}

    on_end = on_round


def run(folder, *others, **more):
    sink = MlflowSink(folder)
    try:
        return cfl.run(CONFIG, stream=toy.stream(), output=folder, sink=Sinks(sink, *others), **more)
    finally:
        sink.close()


@pytest.mark.slow
@pytest.mark.parametrize("killed", [7, 8])  # one round after a checkpoint; between the last round of task 1 and its end
def test_a_store_has_the_options_rounds_and_results_also_of_a_resumed_run(killed, tmp_path, capfd):
    with pytest.raises(Killed):
        run(tmp_path / "mine", Stop(killed), callbacks=[Length()])
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("permuted-digits").experiment_id
    (found,) = client.search_runs([experiment])
    assert found.info.status == "KILLED"
    metrics = run(tmp_path / "mine", resume=True, callbacks=[Length()]).metrics
    assert capfd.readouterr() == ("", "")
    (found,) = client.search_runs([experiment])
    assert (found.info.run_name, found.info.status) == ("mine", "FINISHED")
    assert found.data.params == {
        name: str(value) for name, value in flat(dump(toy.config("eval_every=1", "checkpoint_every=2"))).items()
    }
    rows = [json.loads(line) for line in (tmp_path / "mine/rounds.jsonl").read_text().splitlines()]

    def history(name):
        return [(one.step, one.value) for one in client.get_metric_history(found.info.run_id, name)]

    for name in ("loss", "accuracy"):
        assert history(name) == [(n, row[name]) for n, row in enumerate(rows, 1) if row[name] is not None]
    up = [(n, row["bytes_up"]) for n, row in enumerate(rows, 1) if row["phase"] == "gpse"]
    assert history("bytes_up/gpse") == up and len(up) == 2
    assert history("Length/rounds") == [(n, r) for n, r in enumerate([1, 2, 3, 4, 1, 2, 3, 4, 1, 2], 1)] + [(10, 2)]
    ends = [4, 8, 10]  # two training rounds a task, then gpse and coverage in all tasks but the last
    assert history("task/0") == [(end, row[0]) for end, row in zip(ends, metrics["accuracy_matrix"], strict=True)]
    assert history("ACC") == [(10, metrics["acc"])] and history("FGT") == [(10, metrics["fgt"])]
    assert history("total/bytes_up") == [(10, metrics["bytes_up"])]


class Odd(cfl.Callback):
    """Metrics with names that MLflow refuses."""

    name = "../Odd"

    def on_round(self, view):
        return {"acc@5": 0.5, "a//b": 1.0, "./..": 2.0, "(x)=[1,2]+%é": 3.0, 300 * "n": 4.0}


@pytest.mark.slow
def test_metrics_and_folders_may_have_any_name(tmp_path):
    folder = tmp_path / "a?b=1 %41#c" / "mine"
    run(folder, callbacks=[Odd()])
    assert {"mlflow.db", "mlflow.db.lock"} <= {path.name for path in folder.parent.iterdir()}
    store = f"sqlite:///{tmp_path}/a%3Fb=1 %2541%23c/mlflow.db"
    found = mlflow.MlflowClient(store).get_run((folder / "mlflow-run").read_text()).data.metrics
    names = {"acc_5": 0.5, "a/b": 1.0, "": 2.0, "_x___1_2___é": 3.0, 243 * "n": 4.0}
    own = {f"Odd/{name}".rstrip("/"): value for name, value in names.items()}
    assert own.items() <= found.items() and "ACC" in found


BEGINS = """
import sys
from pathlib import Path
from cfl.runtime.mlflow import MlflowSink
from tests import toy
sink = MlflowSink(Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
sink.start(toy.config(), [], 1)
sink.close()
"""


@pytest.mark.slow
def test_runs_that_begin_at_once_share_a_store_that_is_not_there_yet(tmp_path):
    names = ["a", "b", "c"]
    runs = [
        subprocess.Popen([sys.executable, "-c", BEGINS, tmp_path / name], stdin=-1, stdout=-1, stderr=-1, text=True)
        for name in names
    ]
    for run in runs:
        assert run.stdout.readline() == "ready\n"
    for run in runs:
        run.stdin.write("\n")
        run.stdin.flush()
    assert [run.communicate()[1] for run in runs] == [""] * len(names)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    experiment = client.get_experiment_by_name("permuted-digits").experiment_id
    assert sorted(found.info.run_name for found in client.search_runs([experiment])) == names


@pytest.mark.slow
def test_a_run_that_the_store_does_not_know_begins_there_anew(tmp_path):
    """As after a move of the folder: the rounds after the last checkpoint, that of round 2, are in a new run."""
    with pytest.raises(Killed):
        run(tmp_path / "old/mine", Stop(4))
    (tmp_path / "new").mkdir()
    (tmp_path / "old/mine").rename(tmp_path / "new/mine")
    with pytest.warns(UserWarning, match=r"new/mlflow\.db' lacks the run of '.*mine/mlflow-run', .* a new MLflow run"):
        run(tmp_path / "new/mine", resume=True)
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/new/mlflow.db")
    id = (tmp_path / "new/mine/mlflow-run").read_text()
    assert client.get_run(id).info.status == "FINISHED"
    rounds = len((tmp_path / "new/mine/rounds.jsonl").read_text().splitlines())
    assert [one.step for one in client.get_metric_history(id, "round")] == list(range(3, rounds + 1))
