"""A package that is no part of cfl, installed by pip: its names work on the command line as the built-in ones do.

A test of a command starts a process, which is what it is about; those that build a stream load Avalanche, too.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cfl.config.overrides import read_yaml
from cfl.contract import EMPTY
from cfl.testing import check_strategy, toy_config
from tests.toy import context

SOURCES = Path(__file__).parent / "third_party"
COMMAND = Path(sys.executable).with_name("cfl-run")
# All four clients take part in each round; 100 samples a client of a task.
SMALL = ("tasks=2", "rounds=1", "partition.clients=4", "cohort=4", "local.lr=0.5")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the installed package; the sources are copied first, for pip builds where they lie."""
    copy, target = tmp_path_factory.mktemp("sources") / "package", tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("__pycache__"))
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", *offline, "--target", str(target), str(copy)]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture(scope="module")
def cfl_run(site):
    """The command, in a process of its own that finds the package; gives status, output and errors."""

    def run(*args, values=()):
        options = [part for value in values for part in ("--set", value)]
        environment = {**os.environ, "PYTHONPATH": str(site)}
        command = [COMMAND, *map(str, args), *options]
        # not in the checkout, whose packages Python would then find without any installation
        done = subprocess.run(command, capture_output=True, text=True, cwd=site, env=environment)
        return done.returncode, done.stdout, done.stderr

    return run


@pytest.fixture(scope="module")
def trained(cfl_run, tmp_path_factory):
    """The folder of a run in which all four parts are the package's, and the command that made it."""
    folder = tmp_path_factory.mktemp("runs") / "own"
    names = ("turning-points", "--method", "slowdown", "--local", "sparse-steps")
    own = ("strategy.rate=1000000000", "regularizer.sparse-steps.mu=0.002", "model.name=tanh-net", "model.width=6")
    command = ("train", *names, "--output", folder, "--quiet", "--no-plot")
    status, _, errors = cfl_run(*command, values=(*SMALL, *own))
    assert status == 0, errors
    return folder, command, (*SMALL, *own)


def test_its_hooks_by_hand(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    from cfl_slowdown import Slowdown, SparseSteps

    params = {"a": torch.tensor([3.0, 0.0])}
    # |3 - 1| + |0 - 4| = 6; mu 6 = 3
    ctx = context({"params": {"a": torch.tensor([1.0, 4.0])}}, {}, EMPTY)
    assert SparseSteps(mu=0.5).penalty(params, torch.zeros(1, 2), ctx).item() == 3
    # after 2 rounds with rate 0.5 gradients are divided by 1 + 0.5 * 2 = 2
    ctx = ctx._replace(state={"rounds": torch.tensor(2.0)})
    assert Slowdown(rate=0.5).adjust(params, params, ctx)["a"].tolist() == [1.5, 0.0]
    assert Slowdown().finish(params, ctx, 1)[1] == {"rounds": torch.tensor(3.0)}


@pytest.mark.slow
def test_its_method_conforms(site, monkeypatch):
    monkeypatch.syspath_prepend(site)
    from cfl_slowdown import Slowdown

    check_strategy(Slowdown(rate=0.5), config=toy_config("tasks=2"))


@pytest.mark.slow
def test_list_shows_name_summary_and_source(cfl_run):
    status, shown, errors = cfl_run("list")
    assert status == 0, errors
    lines = {line.split("│")[1].strip(): line for line in shown.splitlines() if line.count("│") > 2}
    for name, summary in {
        "slowdown": "FedAvg whose clients learn slower",
        "sparse-steps": "Proximal term in the 1-norm",
        "turning-points": "two clouds in the plane, turned",
        "tanh-net": "One hidden layer with tanh",
    }.items():
        assert summary in lines[name]
    assert all("an example, no paper" in lines[name] for name in ("slowdown", "sparse-steps", "turning-points"))


@pytest.mark.slow
def test_describe_shows_options_with_default_and_range(cfl_run):
    status, shown, errors = cfl_run("describe", "slowdown")
    assert status == 0, errors
    (row,) = (line for line in shown.splitlines() if "strategy.rate" in line)
    assert "0.1" in row and "[0, inf)" in row and "divides its gradients" in row


@pytest.mark.slow
def test_train_uses_all_four_parts(trained):
    folder, _, _ = trained
    metrics, config = json.loads((folder / "metrics.json").read_text()), read_yaml(folder / "config.yaml")
    assert (metrics["method"], metrics["benchmark"]) == ("slowdown+sparse-steps", "turning-points")
    assert config["strategy"] == {"rate": 1e9} and config["regularizer"] == {"sparse-steps": {"mu": 0.002}}
    # the model: (2 + 1) 6 + (6 + 1) 2 = 32 numbers of 4 bytes, up from 4 clients in a round of each of 2 tasks
    assert metrics["bytes_up"] == 32 * 4 * 4 * 2
    # the client's state: one number, how many rounds it has taken part in
    assert metrics["client_bytes"] == metrics["client_bytes_max"] == 4
    # the method: after the first round the gradients are divided by 1e9, so the model stays, and forgets nothing
    (first, _), (later, _) = metrics["accuracy_matrix"]
    assert first == later and metrics["fgt"] == 0
    # the benchmark: the clouds are more than three standard deviations from the border, so a round suffices
    assert first > 0.9


@pytest.mark.slow
def test_a_finished_run_resumes_to_the_same_metrics(cfl_run, trained):
    folder, command, values = trained
    before = json.loads((folder / "metrics.json").read_text())
    (folder / "metrics.json").unlink()
    status, _, errors = cfl_run(*command, "--resume", values=values)
    assert status == 0, errors
    after = json.loads((folder / "metrics.json").read_text())
    assert {**after, "seconds": None} == {**before, "seconds": None}
    assert len((folder / "rounds.jsonl").read_text().splitlines()) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "value", "named"),
    [
        (("--method", "slowdown"), "strategy.rate=-1", "strategy.rate must be a number in [0, inf), not -1"),
        pytest.param(
            ("--local", "sparse-steps"),
            "regularizer.sparse-steps.mi=1",
            "'regularizer.sparse-steps.mu'",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_wrong_option_exits_2_with_a_line_that_names_it(cfl_run, args, value, named):
    status, shown, errors = cfl_run("train", "turning-points", *args, values=[value])
    assert (status, shown) == (2, "")
    assert len(errors.splitlines()) == 1 and named in errors


@pytest.mark.slow
def test_compare_takes_it_beside_a_built_in_method(cfl_run, tmp_path):
    """The limit rate = 0: no client slows down, so this is FedAvg to the last bit."""
    args = ("compare", "permuted-digits", "--methods", "fedavg,slowdown", "--output", tmp_path, "--quiet", "--no-plot")
    status, shown, errors = cfl_run(*args, values=("tasks=2", "rounds=1", "strategy.rate=0"))
    assert status == 0, errors
    assert "fedavg" in shown and "slowdown" in shown
    paths = [next(tmp_path.glob(f"{name}-seed0-*")) / "metrics.json" for name in ("fedavg", "slowdown")]
    runs = [json.loads(path.read_text()) for path in paths]
    assert [run["method"] for run in runs] == ["fedavg", "slowdown"]
    assert runs[0]["accuracy_matrix"] == runs[1]["accuracy_matrix"]


FEDERATION = """
import sys
from pathlib import Path
from cfl.flower import apps
from cfl.flower.forward import client
from cfl.flower.in_process import InProcessGrid

config, folder = Path(sys.argv[1]), Path(sys.argv[2])
nodes = [{"clients": clients, "folder": str(folder / clients)} for clients in ("0-1", "2-3")]
apps.serve(config, InProcessGrid([client(config, lambda: apps.answer)] * 2, nodes), folder / "out")
"""


@pytest.mark.slow
def test_nodes_that_have_it_run_it_and_the_others_name_what_they_lack(trained, site, tmp_path):
    """The nodes with the package are in another process, as they would be elsewhere; this process has not got it."""
    app = pytest.importorskip("flwr.app", reason="the extra flower is not installed")
    from cfl.flower import apps, wire

    folder, *_ = trained
    command = [sys.executable, "-c", FEDERATION, str(folder / "config.yaml"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(site)})
    assert done.returncode == 0, done.stderr
    found, expected = (json.loads((path / "metrics.json").read_text()) for path in (tmp_path / "out", folder))
    assert found["accuracy_matrix"] == expected["accuracy_matrix"]
    context = app.Context(1, 1, {"clients": "0", "folder": str(tmp_path / "n")}, app.RecordDict(), {})
    answer = apps.answer("join", folder / "config.yaml", wire.pack(None), context)
    assert "unknown method 'slowdown'" in str(answer.config_records["fault"]["text"])
