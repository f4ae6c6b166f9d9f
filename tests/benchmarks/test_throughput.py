"""`benchmarks/throughput.py`: the same work for all that it compares, and figures that follow from the seconds."""

import json
import os
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from cfl.core import plugins
from cfl.engines.choose import Choice
from cfl.runtime import builder
from cfl.runtime.session import Session

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def scripts(script):
    return {name: script(f"throughput{name}") for name in ("", "_work", "_peak", "_peer")}


@pytest.fixture
def tp(scripts):
    return scripts[""]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """Forget afterwards what the scripts register."""
    for registry in (plugins.benchmarks, plugins.models):
        monkeypatch.setattr(registry, "_items", dict(registry._items))


def workload(scripts, **changes):
    """Three clients of 20 samples; for the MLP 8-16-3 of one batch each, so that no order of samples matters."""
    small = dict(name="tiny", clients=3, samples=20, batch=20, shape=(8,), classes=3, model="mlp", lr=0.1)
    return scripts["_work"].Workload(**{**small, "options": {"hidden": [16]}, **changes})


@pytest.fixture
def work(scripts):
    return workload(scripts)


# -- the work


def test_steps_count_the_partial_last_batches(scripts):
    found = {name: work.steps for name, work in scripts["_work"].WORKLOADS.items()}
    # clients x ceil(samples / batch): 70 / 16 is 4.4, 480 / 64 is 7.5, 100 / 16 is 6.25
    mnist = {"pmnist-round": 512, "pmnist-dropout": 512}
    assert found == {"permuted-digits": 50, **mnist, "cifar100-round": 175, "resnet-round": 70}


def test_flops_of_a_linear_stack(scripts):
    """Of a sample, a layer a -> b takes 2ab forward, 2ab for the weight's gradient and 2ab for its input's, which the
    first layer does not need: 4 x 8 x 16 + 6 x 16 x 3 = 800; 60 samples."""
    assert workload(scripts, batch=8).flops() == 60 * (4 * 8 * 16 + 6 * 16 * 3)


def test_flops_of_a_convolution(scripts):
    """A convolution is a matrix product at each place of its output: the first, 48 -> 64 at 29 x 29 places, twice;
    64 x 9 -> 128 at 12 x 12 and 128 x 4 -> 256 at 5 x 5, three times, as 1024 -> 2048 -> 2048 -> 10."""
    work = scripts["_work"].WORKLOADS["cifar100-round"]
    later = 64 * 9 * 128 * 12 * 12 + 128 * 4 * 256 * 5 * 5 + 1024 * 2048 + 2048 * 2048 + 2048 * 10
    assert work.flops() == 2500 * (4 * 48 * 64 * 29 * 29 + 6 * later)


def test_a_workload_travels_as_text(scripts):
    for work in scripts["_work"].WORKLOADS.values():
        assert scripts["_work"].Workload.load(work.dump()) == work


# -- the same work


def test_all_make_the_same_step(tp, work):
    """One batch a client: each update is lr times the gradient of that client's mean loss, and their mean lr times that
    of all samples, whoever holds which."""
    module, (x, y) = work.module(), work.data()
    torch.nn.functional.cross_entropy(module(x), y).backward()
    expected = {name: work.lr * leaf.grad for name, leaf in module.named_parameters()}
    with tp.known(work):
        ours = tp.Ours(work, "loop", "cpu")
    for found in (ours.round(), tp.Plain(work, "cpu").round(), tp.Hand(work, ours).round()):
        assert found.keys() == expected.keys()
        for name, leaf in expected.items():
            assert torch.allclose(found[name], leaf, rtol=0, atol=1e-6)  # float32 keeps 7 digits of weights below 1


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_the_hand_written_loop_takes_the_engines_own_batches(tp, scripts, model):
    """Several steps in the engine's order, a partial batch among them: the same weights, but for rounding."""
    net = {"width": 4, "norm": True}, (3, 20, 20)
    options, shape = net if model == "resnet18" else ({"hidden": [16]}, (8,))
    work = workload(scripts, batch=8, shape=shape, model=model, options=options)
    with tp.known(work):
        ours = tp.Ours(work, "loop", "cpu")
    hand = tp.Hand(work, ours)
    expected = ours.round()
    scale = max(float(leaf.abs().max()) for leaf in expected.values())
    for name, leaf in hand.round().items():
        assert torch.allclose(leaf, expected[name], rtol=0, atol=1e-4 * scale)


def test_plain_bf16_rounds_what_plain_computes(tp, work):
    """bfloat16 keeps 8 bits, so each of the few roundings of an update is 2^-8 = 0.4 % of it; weights are float32."""
    plain, rounded = tp.Plain(work, "cpu").round(), tp.Plain(work, "cpu", bf16=True).round()
    error = tp.size({name: rounded[name] - leaf for name, leaf in plain.items()})
    assert 1e-4 * tp.size(plain) < error < 0.05 * tp.size(plain)
    assert all(leaf.dtype == torch.float32 for leaf in rounded.values())


def test_the_precision_reaches_the_configuration(tp, work, monkeypatch):
    seen = []

    def load(options):
        seen.append(options)
        raise InterruptedError  # before a run is built

    monkeypatch.setattr(tp.configuration, "load", load)
    for precision in ("float32", "bf16"):
        with pytest.raises(InterruptedError):
            tp.Ours(work, "loop", "cpu", precision=precision)
    first, second = seen
    assert first["precision"] == "float32" and second == {**first, "precision": "bf16"}


def test_bf16_beside_our_own_float32(tp, work, monkeypatch):
    used, build = [], tp.configuration.load
    monkeypatch.setattr(tp.configuration, "load", lambda options: used.append(options["precision"]) or build(options))
    row = tp.measure(work, "loop", ["float32"], runs=1, best=1.0, burst=0.0, precision="bf16")
    assert used == ["bf16", "float32"]
    assert row["ratio_vs_float32"] == row["seconds"]["float32"][0] / row["seconds"]["ours"][0]


def test_our_other_engine_has_the_same_options(tp, work, monkeypatch):
    used, made = [], tp.Ours
    monkeypatch.setattr(tp, "Ours", lambda work, *options: used.append(options) or made(work, "loop", "cpu"))
    tp.measure(work, "flower", ["pool+vmapped"], runs=1, best=1.0, burst=0.0, block=2, precision="bf16", compile=True)
    assert used == [(engine, "cpu", 2, "bf16", True) for engine in ("flower", "pool+vmapped")]


def test_other_work_is_refused(tp, work, monkeypatch):
    monkeypatch.setattr(tp.Plain, "round", lambda self: {"w": torch.ones(1)})
    with pytest.raises(RuntimeError, match="tiny: plain moves the weights by 1.0"):
        tp.measure(work, "loop", ["plain"], runs=1, best=1.0, burst=0.0)


# -- figures


def test_figures_follow_from_the_seconds(tp, work):
    row = tp.measure(work, "loop", ["plain", "hand"], runs=3, best=2.0, burst=0.0)
    median = {name: statistics.median(seconds) for name, seconds in row["seconds"].items()}
    assert {name: len(seconds) for name, seconds in row["seconds"].items()} == {"ours": 3, "plain": 3, "hand": 3}
    assert (row["workload"], row["precision"], row["engine"]) == ("tiny", "float32", "loop")
    assert row["steps_per_second"] == pytest.approx(3 / median["ours"])  # a batch a client
    assert row["gflops"] == pytest.approx(60 * 800 / median["ours"] / 1e9)
    assert row["share_of_peak"] == pytest.approx(row["gflops"] / 2.0)
    assert row["ratio_vs_plain"] == pytest.approx(median["plain"] / median["ours"])
    own = f"{median['ours'] / median['hand'] - 1:+.1%}"
    title, line, cost = tp.table([row], ["plain", "hand"])
    assert "plain/ours" in title and f"{row['ratio_vs_plain']:.2f}" in line and own in cost


def test_bf16_has_a_ratio_of_its_own(tp, work):
    row = tp.measure(work, "loop", ["plain", "plain-bf16"], runs=1, best=1.0, burst=0.0)
    (ours,), (rounded,) = row["seconds"]["ours"], row["seconds"]["plain-bf16"]
    assert row["ratio_vs_plain_bf16"] == pytest.approx(rounded / ours)
    _, line = tp.table([{**row, "precision": "bf16"}], ["plain", "plain-bf16"])
    assert "loop bf16" in line


def test_names_of_alternatives(tp, monkeypatch):
    """pfl stands for both of its ways, each of which is timed once."""
    seen = []
    monkeypatch.setattr(tp, "peak", lambda device: {"gflops": 1.0, "processes": 1, "threads": 1, "size": 1})
    monkeypatch.setattr(tp, "table", lambda rows, against: [])

    def measure(work, engine, against, **options):
        seen.append((against, options["precision"], options["pythons"]["jax"]))
        return {}

    monkeypatch.setattr(tp, "measure", measure)
    names = ["plain", "plain-bf16", "pfl-2", "flower", "jax"]
    one = ["--workload", "resnet-round", "--against"]
    tp.main([*one, ",".join(names), "--precision", "bf16", "--python-jax", "other"])
    tp.main([*one, "pfl,pfl-2"])
    assert seen == [(names, "bf16", "other"), (["pfl", "pfl-2"], "float32", sys.executable)]
    assert [tp.ratio(name) for name in ("pfl-2", "jax")] == ["ratio_vs_pfl_2", "ratio_vs_jax"]


def test_runs_alternate(tp, work, monkeypatch):
    turns = []
    monkeypatch.setattr(tp.Ours, "round", lambda self: turns.append("ours") or {"w": torch.ones(1)})
    monkeypatch.setattr(tp.Plain, "round", lambda self: turns.append("plain") or {"w": torch.ones(1)})
    tp.measure(work, "loop", ["plain"], runs=3, best=1.0, burst=0.0)
    assert turns[-6:] == ["ours", "plain"] * 3


def test_what_is_not_installed_is_said(tp, work, monkeypatch):
    monkeypatch.setattr(tp, "installed", lambda package, python: False)
    row = tp.measure(work, "loop", ["pfl", "pfl-2"], runs=1, best=1.0, burst=0.0)
    assert row["ratio_vs_pfl"] is None and row["ratio_vs_pfl_2"] is None and list(row["seconds"]) == ["ours"]
    assert row["notes"] == {"pfl": "not installed", "pfl-2": "not installed"}
    assert "not installed" in "\n".join(tp.table([row], ["pfl", "pfl-2"]))


def test_installed_looks_without_importing(tp):
    assert tp.installed("this", sys.executable)  # importing it prints a poem
    assert not tp.installed("no_such_package", sys.executable)


@pytest.mark.parametrize("name", ["pfl", "pfl-2", "flower", "jax"])
def test_the_other_simulators_make_the_same_step(tp, work, name):
    package = tp.PACKAGES[name]
    python = os.environ.get(f"CFL_PYTHON_{package.upper()}")
    if python is None or not tp.installed(package, python):  # takes half a minute
        pytest.skip(f"name an interpreter that has {package} in CFL_PYTHON_{package.upper()}")
    peer = tp.beside(name, work, "cpu", python)
    try:
        assert peer.first["moved"] == pytest.approx(tp.size(tp.Plain(work, "cpu").round()), rel=1e-5)
        assert peer.ask("2")["seconds"] > 0
    finally:
        peer.close()


# -- throughput_jax.py


@pytest.fixture
def other(script):
    pytest.importorskip("jax", reason="jax is not installed here; benchmarks/requirements-throughput.txt has it")
    return script("throughput_jax")


def close(found, expected, atol):
    assert found.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_allclose(np.asarray(found[name]), np.asarray(leaf), rtol=0, atol=atol, err_msg=name)


@pytest.mark.parametrize("name", ["permuted-digits", "pmnist-round", "cifar100-round", "resnet-round"])
def test_jax_has_torchs_networks(other, scripts, name):
    """Logits, and the weights after one step of rate 1, which is the gradient. That in float64: a ReLU of torch's
    ResNet that rounds to the other side of zero changes gradients in float32 by 1 %."""
    work = replace(scripts["_work"].WORKLOADS[name], clients=1, samples=4, lr=1.0)
    module, (x, y) = work.module(), work.data()
    found = other.forward(work)(other.converted(dict(module.named_parameters())), x.numpy())
    np.testing.assert_allclose(np.asarray(found), module(x).detach().numpy(), rtol=0, atol=1e-5)
    module, x = module.double(), x.double()
    leaves = dict(module.named_parameters())
    torch.nn.functional.cross_entropy(module(x), y).backward()
    with other.jax.enable_x64(True):
        start = other.converted(leaves)
        after = other.converted({name: leaf - leaf.grad for name, leaf in leaves.items()})
        close(other.jax.jit(other.sgd(work))(start, x.numpy(), y.numpy()), after, 1e-10)


@pytest.mark.parametrize("model", ["mlp", "resnet18"])
def test_a_round_in_jax_is_that_of_torch(other, scripts, model):
    """Three clients in blocks of two, 20 samples in batches of 8, in given orders: both leave a smaller rest."""
    net = {"width": 4, "norm": True, "stem_stride": 1}, (3, 20, 20)
    options, shape = net if model == "resnet18" else ({"hidden": [16]}, (8,))
    work = workload(scripts, batch=8, shape=shape, model=model, options=options, lr=0.01)
    (x, y), start = work.data(), work.module().state_dict()
    x, y = x.reshape(3, 20, *shape), y.reshape(3, 20)
    orders = np.random.default_rng(1).permuted(np.tile(np.arange(20), (3, 1)), axis=1)
    total = {name: torch.zeros_like(leaf) for name, leaf in start.items()}
    for own, labels, order in zip(x, y, torch.from_numpy(orders), strict=True):
        module = work.module()
        optimizer = torch.optim.SGD(module.parameters(), lr=work.lr)
        for batch in order.split(8):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(own[batch]), labels[batch]).backward()
            optimizer.step()
        for name, leaf in module.state_dict().items():
            total[name] += leaf
    found = other.trained(work, 2)(other.converted(start), x.numpy(), y.numpy(), orders)
    close(found, other.converted(total), 1e-5)


def test_the_command_stores_what_it_prints(tp, work, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(tp.WORKLOADS, "tiny", work)
    found = {"gflops": 2.0, "processes": 1, "threads": 1, "size": 512, "samples": []}
    monkeypatch.setattr(tp, "peak", lambda device: found)
    path = tmp_path / "new" / "found.json"
    tp.main(["--workload", "tiny", "--engine", "loop", "--runs", "1", "--json", str(path)])
    stored = json.loads(path.read_text())
    assert stored["workloads"][0]["peak"] == found and stored["machine"]["torch"] == torch.__version__
    (row,) = stored["workloads"]
    assert row["workload"] == "tiny" and f"{row['ratio_vs_plain']:.2f}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        tp.main(["--against", "plane"])


# -- processes


def test_the_peak_is_the_best_of_all_ways(scripts):
    """Two flops for each of the n^3 products of a multiplication; sizes and ways are told apart."""
    found = scripts["_peak"].peak(sizes=(32, 64), bursts=1, seconds=0.01)
    assert {row["size"] for row in found["samples"]} == {32, 64}
    assert found["gflops"] == pytest.approx(max(row["rates"][0] for row in found["samples"]) / 1e9)


def test_a_process_that_fails_says_why(scripts):
    with pytest.raises(RuntimeError, match=r"no_script.py ended \(2\):\n.*No such file"):
        scripts["_peer"].Peer(sys.executable, "no_script.py")


@pytest.mark.parametrize("engine", ["loop", "vmapped"])
def test_rounds_of_a_checkout_are_timed(scripts, engine):
    arguments = [str(SCRIPTS.parent), "--serve", "permuted-digits", engine]
    peer = scripts["_peer"].Peer(sys.executable, "throughput_versions.py", arguments)
    try:
        assert peer.first == {"ready": True} and peer.ask("1")["seconds"] > 0
    finally:
        peer.close()


# -- scaling.py


@pytest.fixture
def scaling(script):
    return script("scaling")


def test_a_point_times_rounds_and_draws(scaling, tmp_path):
    sizes = dict(cohort=2, samples=4, width=3, hidden=[5], rounds=2)
    points = [scaling.point("loop", clients=clients, **sizes) for clients in (5, 10)]
    for point, clients in zip(points, (5, 10), strict=True):
        assert (point["clients"], point["cohort"], point["engine"]) == (clients, 2, "loop")
        assert len(point["seconds"]) == 2 and point["peak_bytes"] >= point["imported_bytes"] > 2**20
    rows = [{"task": 0, "server_seconds": 1.0, "gpse_client_seconds": 2.0, "gpse_server_seconds": 3.0, "rank": 4}]
    last = {**rows[0], "task": 1, "gpse_client_seconds": None, "gpse_server_seconds": None}
    scaling.draw({"cohort": points, "population": points, "tasks": [*rows, last]}, tmp_path / "new")
    assert {path.name for path in (tmp_path / "new").iterdir()} == {"cohort.png", "population.png", "tasks.png"}


def test_rounds_of_auto_have_the_threads_that_it_chose(scaling, monkeypatch):
    seen = []
    monkeypatch.setattr(builder, "choose", lambda *given: Choice("loop", None, 2))
    monkeypatch.setattr(Session, "round", lambda self, position: seen.append(torch.get_num_threads()))
    scaling.point("auto", clients=2, cohort=2, samples=4, width=3, hidden=[5], rounds=1)
    scaling.tasks("auto", count=1, rounds=1)
    assert seen == [2, 2, 2]  # the first round warms up


def test_scaling_as_a_command(tmp_path):
    path = tmp_path / "scaling.json"
    options = "--engine loop --cohorts 2 --populations 10 --tasks 2 --rounds 1".split()
    command = [sys.executable, str(SCRIPTS / "scaling.py"), *options, "--json", str(path), "--plot", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)
    found = json.loads(path.read_text())
    (cohort,), (population,), tasks = found["cohort"], found["population"], found["tasks"]
    assert (cohort["clients"], cohort["cohort"]) == (2, 2) and (population["clients"], population["cohort"]) == (10, 10)
    assert [row["task"] for row in tasks] == [0, 1] and tasks[1]["gpse_client_seconds"] is None
    assert tasks[0]["gpse_client_seconds"] > 0 and 0 < tasks[0]["rank"] == tasks[1]["rank"]  # no sketch at the end
    assert all((tmp_path / f"{name}.png").stat().st_size > 1000 for name in ("cohort", "population", "tasks"))
