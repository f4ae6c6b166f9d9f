"""Comparisons: planned runs, parallel processes, kills, and two comparisons in one folder."""

import importlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import stats

import cfl
from cfl.assembly.resolve import dump, load
from cfl.config.overrides import read_yaml
from cfl.config.schema import RunConfig
from cfl.core import Busy, CheckpointError, ConfigError, machine, plugins
from cfl.experiments import parallel
from cfl.experiments.compare import HOW, alone, digest, experiment, finished, finished_in, plan
from cfl.experiments.parallel import default_jobs, run_all
from cfl.methods.strategies.fot import FOT
from cfl.report import paired
from cfl.runtime.run_folder import RunFolder
from cfl.streams.tokens import TextOptions, Texts, encoder

FEW = ["tasks=2", "rounds=3", "model.hidden=[8]", "partition.clients=4"]
OPTIONS = [text for one in FEW for text in ("--set", one)]


def labels(*args, **also):
    return [group.label for group in plan("permuted-digits", *args, Path("runs"), **also)]


def test_a_plan_is_methods_by_settings_without_options_that_a_method_lacks():
    found = labels("fedavg,fot", "0", vary=["strategy.threshold=0.8,0.9", "partition.name=iid,shards"])
    assert found == [
        "fedavg, partition.name=iid",
        "fedavg, partition.name=shards",
        "fot, strategy.threshold=0.8, partition.name=iid",
        "fot, strategy.threshold=0.8, partition.name=shards",
        "fot, strategy.threshold=0.9, partition.name=iid",
        "fot, strategy.threshold=0.9, partition.name=shards",
    ]


def test_an_unknown_benchmark_is_an_error_before_any_run():
    with pytest.raises(ConfigError, match="did you mean 'permuted-digits'"):
        plan("permuted-digit", "fedavg", "0", Path())


def test_vary_reads_numbers_as_set_does():
    groups = plan("permuted-digits", "fedavg", "0", Path(), vary=["local.lr=1e-3,0.5"])
    assert [run.config.local.lr for group in groups for run in group.runs] == [0.001, 0.5]
    with pytest.raises(ConfigError, match="--vary takes local.lr once"):
        plan("permuted-digits", "fedavg", "0", Path(), vary=["local.lr=0.1", "local.lr=0.5"])
    with pytest.raises(ConfigError, match="value of model.hidden is not valid YAML"):
        plan("permuted-digits", "fedavg", "0", Path(), vary=["model.hidden=[8"])


def test_a_group_is_paired_with_all_groups_that_agree_in_common_options():
    vary = ["strategy.threshold=0.8,0.9", "local.lr=0.1,0.2"]
    groups = plan("permuted-digits", "fedavg,fot", "0", Path(), vary=vary)

    def pairs(method, other):
        return {g.label: [o.label for o in g.counterparts(groups, other)] for g in groups if g.method == method}

    fot = {lr: [f"fot, strategy.threshold={value}, local.lr={lr}" for value in (0.8, 0.9)] for lr in (0.1, 0.2)}
    assert pairs("fot", "fedavg") == {label: [f"fedavg, local.lr={lr}"] for lr in fot for label in fot[lr]}
    assert pairs("fedavg", "fot") == {f"fedavg, local.lr={lr}": fot[lr] for lr in fot}


def test_differences_from_a_varied_reference_are_complete(tmp_path):
    groups = plan("permuted-digits", "fot,fedavg", "0..1", tmp_path, vary=["strategy.threshold=0.8,0.9"])
    for number, group in enumerate(groups):  # thresholds 0.8 and 0.9, fedavg
        for run in group.runs:
            run.folder.mkdir()
            seed = run.config.seed
            (run.folder / "metrics.json").write_text(json.dumps({"seed": seed, "acc": number / 8, "fgt": 0.0}))
    found = {label: row["acc"]["mean"] for label, row in paired.against(groups, "fot").items()}
    # fedavg has 2/8, fot 0/8 and 1/8
    assert found == {f"fedavg less fot, strategy.threshold={t}": gap for t, gap in ((0.8, 0.25), (0.9, 0.125))}


def test_names_and_folders_of_runs_are_unique():
    runs = [run for g in plan("permuted-digits", "fot,fot+fedprox", "0..2", Path("x")) for run in g.runs]
    assert len({run.folder for run in runs}) == len({run.name for run in runs}) == 6
    assert runs[4].folder.name.startswith("fot+fedprox-seed1-") and runs[4].name == "fot+fedprox, seed 1"


def test_the_hash_depends_on_options_that_decide_the_result():
    """Without draws inside the network, no engine does."""
    plain = cfl.resolve("permuted-digits")
    how = {
        "engine": "pool",
        "block": 2,
        "compile": True,
        "workers": 3,
        "threads": 2,
        "device": "auto",
        "checkpoint_every": 7,
    }
    how["flower"] = "{deadline: 7.0}"
    assert set(how) == set(HOW)
    for each in [f"{name}={value}" for name, value in how.items()] + ["engine=vmapped", "engine=auto"]:
        other = cfl.resolve("permuted-digits", overrides=[each])
        assert digest(other) == digest(plain) == experiment(other) == experiment(plain)
    for text in ("seed=1", "local.lr=0.06", "method=fot", "eval_batch_size=7", "partition.name=shards"):
        other = cfl.resolve("permuted-digits", overrides=[text])
        assert digest(other) != digest(plain) and experiment(other) != experiment(plain)


def test_the_hash_of_a_run_with_dropout_depends_on_who_shares_the_draws():
    def config(*overrides):
        return cfl.resolve("permuted-digits", overrides=["model.dropout=[0.5,0.5]", *overrides])

    def block(engine, size):
        return digest(config(f"engine={engine}", f"block={size}"))

    each_client = {digest(config(*one)) for one in ([], ["engine=pool"], ["engine=pool", "block=2"], ["threads=2"])}
    assert len(each_client) == 1
    blocks = [block("vmapped", 2), block("vmapped", 3), block("vmapped", "null"), digest(config("engine=auto"))]
    assert len({*each_client, *blocks, digest(config("device=cuda"))}) == 6
    assert block("pool+vmapped", 2) == block("vmapped", 2)  # the blocks are the same
    assert len({experiment(config(f"engine={name}")) for name in ("loop", "pool", "vmapped", "auto")}) == 1


def small(*overrides):
    few = ["tasks=1", "rounds=2", "model.hidden=[8]", "model.dropout=[0.5]", "partition.clients=4", "cohort=4"]
    return [*few, *overrides]


def planned(folder, *overrides, method="fedavg"):
    ((run,),) = (group.runs for group in plan("permuted-digits", method, "0", folder, overrides=small(*overrides)))
    return run


def test_a_finished_run_stands_for_a_plan_with_the_same_draws(tmp_path):
    run = planned(tmp_path, "engine=vmapped", "block=2")
    cfl.run(run.config, output=run.folder)
    run = replace(run, folder=run.folder.rename(tmp_path / "mine"))  # named by an earlier version
    for same in (
        ["engine=vmapped", "block=2"],
        ["engine=pool+vmapped", "block=2"],
        ["engine=vmapped"],
        ["engine=auto"],
    ):
        assert planned(tmp_path, *same).folder == run.folder
    other = [planned(tmp_path), planned(tmp_path, "engine=pool"), planned(tmp_path, "engine=vmapped", "block=4")]
    assert [one.results() for one in other] == [None] * 3 and other[0].folder == other[1].folder != other[2].folder
    found = cfl.run(other[0].config, output=other[0].folder).params
    vmapped = cfl.run(run.config, output=run.folder, resume=True).params
    assert max(float((found[name] - leaf).abs().max()) for name, leaf in vmapped.items()) > 1e-3  # more than rounding


PLUGIN = """
from cfl.contract import Strategy

class Mine(Strategy):
    def adjust(self, grads, params, ctx):
        return {{name: {factor} * leaf for name, leaf in grads.items()}}
"""


def test_a_run_is_repeated_after_the_code_of_its_method_has_changed(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def write(factor):
        (tmp_path / "mine_of_another_package.py").write_text(PLUGIN.format(factor=factor))
        sys.modules.pop("mine_of_another_package", None)
        found = importlib.import_module("mine_of_another_package").Mine
        monkeypatch.setitem(plugins.strategies._items, "mine", found)

    write("0.5")
    first = planned(tmp_path / "runs", method="mine")
    acc = cfl.run(first.config, output=first.folder).metrics["acc"]
    assert "the code of method 'mine'" in json.loads((first.folder / "made_of.json").read_text())["code"]
    assert planned(tmp_path / "runs", method="mine").results()["acc"] == acc
    write("22.0")
    second = planned(tmp_path / "runs", method="mine")
    assert second.folder != first.folder and second.results() is None and first.results()["acc"] == acc
    with pytest.raises(CheckpointError, match="the code of mine_of_another_package.Mine changed since the run began"):
        cfl.run(first.config, output=first.folder, resume=True)
    write("0.5")
    assert planned(tmp_path / "runs", method="mine").folder == first.folder
    sys.modules.pop("mine_of_another_package")


def test_stored_runs_of_built_in_methods_need_no_record_of_code():
    runs = Path(__file__).parents[2] / "benchmarks" / "results" / "runs"
    stored = finished(runs)
    assert stored and not list(runs.rglob("made_of.json"))
    assert {read_yaml(path / "config.yaml")["engine"] for path in stored.values()} >= {"loop", "pool+vmapped"}
    for own, path in stored.items():
        config = load(read_yaml(path / "config.yaml"))
        assert experiment(config.model_copy(update={"engine": "vmapped", "block": 3})) == own == experiment(config)


def test_the_folder_of_a_single_run_has_a_hash_if_options_are_set():
    def name(*overrides, method="fot", **layers):
        return alone(cfl.resolve("permuted-digits", method=method, overrides=overrides, **layers))

    assert name(seed=3) == name("engine=pool", "workers=2", seed=3) == "permuted-digits-fot-seed3"
    names = {name("local.lr=0.2"), name("local.lr=0.3"), name("local.lr=0.2", method="fedavg"), name(scale="smoke")}
    assert len(names) == 4 and all(re.fullmatch(r"permuted-digits-\w+-seed0-[0-9a-f]{10}", each) for each in names)


@pytest.mark.parametrize(
    ("vary", "named"),
    [
        ("strategy.threshold", "--vary takes key=value,value"),
        ("local.lr=", "--vary takes key=value,value"),
        ("engine=loop,pool", "--vary cannot take engine; .* give each value a comparison with an --output"),
        ("local.lrr=1,2", "did you mean 'local.lr'"),
        ("strategy.threshold=0.8,2", r"strategy.threshold must be a number in \(0, 1\], not 2"),
    ],
)
def test_an_option_that_cannot_vary_is_an_error_before_any_run(vary, named):
    with pytest.raises(ConfigError, match=named):
        plan("permuted-digits", "fot", "0", Path(), vary=[vary])


@pytest.mark.parametrize("flag", ["vary", "grid"])
def test_scales_to_compare_beside_a_scale_for_all_runs_are_an_error(flag):
    """The argument wins over options of a setting, so rows named scale=smoke and scale=paper had one run's figures."""
    with pytest.raises(ConfigError, match=f"scale is in --scale and in --{flag}; leave it out of one of them"):
        plan("split-digits", "fedavg", "0", Path(), scale="small", **{flag: ["scale=smoke,paper"]})
    groups = plan("split-digits", "fedavg", "0", Path(), **{flag: ["scale=smoke,paper"]})
    assert [group.runs[0].config.scale for group in groups] == ["smoke", "paper"]


@pytest.mark.parametrize("flag", ["vary", "grid"])
@pytest.mark.parametrize("given", ["strategy.threshold=0.8", "strategy={threshold: 0.8}"])
@pytest.mark.parametrize("varied", ["strategy.threshold=0.85,0.9", "strategy={threshold: 0.85},{threshold: 0.9}"])
def test_an_option_that_is_set_for_all_runs_cannot_vary(given, varied, flag):
    """The values of the setting won without a word, so no run had the value that --set names."""
    with pytest.raises(ConfigError, match=f"strategy.threshold is in --set and in --{flag}; leave it out of one of"):
        plan("permuted-digits", "fot", "0", Path(), overrides=[given], **{flag: [varied]})


@pytest.mark.parametrize(
    ("methods", "text", "message"),
    [
        ("fedavg,fot", "threshold=0.8", "unknown option 'threshold'; did you mean 'strategy.threshold'?"),
        ("fedavg,fot", "treshold=0.8", "unknown option 'treshold'; did you mean 'strategy.threshold'?"),
        ("fedavg,fot", "lr=0.8", "unknown option 'lr'; did you mean 'local.lr'?"),
        ("fedavg,er", "strategy.min_rank=2", "no method named here has the option strategy.min_rank; 'fot' has"),
        ("fedavg,fot", "strategy=3", "strategy is a group of options, not 3; set one of strategy.<option>"),
    ],
)
def test_an_unknown_option_is_searched_in_all_methods(methods, text, message):
    for layer in ("vary", "overrides"):
        with pytest.raises(ConfigError) as caught:
            plan("permuted-digits", methods, "0", Path(), **{layer: [text]})
        assert str(caught.value) == message


def test_a_field_without_cfl_option_is_set_as_in_a_single_run(monkeypatch):
    @dataclass(frozen=True)
    class Plain(cfl.Strategy):
        beta: float = 0.9

    monkeypatch.setitem(plugins.strategies._items, "plain", Plain)
    groups = plan("permuted-digits", "fedavg,plain", "0", Path(), overrides=["strategy.beta=0.3"])
    assert [group.runs[0].config.strategy for group in groups] == [{}, {"beta": 0.3}]


@pytest.mark.parametrize(
    ("text", "what"), [("", ""), ('{"method": "fed', ""), ("[]", r" \(Input should be a valid dictionary\)")]
)
def test_a_damaged_result_is_an_error_before_any_run(text, what, tmp_path):
    ((first, second),) = (group.runs for group in plan("permuted-digits", "fedavg", "0..1", tmp_path))
    second.folder.mkdir()
    (second.folder / "metrics.json").write_text(text)
    with pytest.raises(ConfigError, match=f"{second.folder.name}/metrics.json' is damaged{what}; move its folder"):
        run_all([first, second], quiet=True)
    assert not first.folder.exists()


def test_a_stored_run_with_unknown_options_is_named(tmp_path):
    for name, text in (("good", "benchmark: permuted-digits"), ("bad", "method: fott"), ("other", None)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "metrics.json").write_text("{}")
        if text:
            (tmp_path / name / "config.yaml").write_text(text)
    assert list(finished(tmp_path / "good", tmp_path / "other").values()) == [tmp_path / "good"]
    with pytest.raises(ConfigError, match=r"the run '.*bad' is from another version.*did you mean 'fot'"):
        finished(tmp_path)


def test_a_finished_run_of_an_earlier_version_is_found(tmp_path):
    """Such a run has fewer options, so its name has a different hash; runs with unknown options are skipped."""
    old = dump(cfl.resolve("permuted-digits", method="fot", overrides=FEW))
    missing = old["strategy"].pop("draw"), old.pop("eval_local")
    assert None not in missing
    configs = {"fot-seed0-0123456789": old, "theirs-seed0-0123456789": {"method": "theirs"}}
    configs["killed-seed0-0123456789"] = {**old, "seed": 1}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(json.dumps(config))  # JSON is YAML
        (tmp_path / name / "metrics.json").write_text('{"acc": 0.5}')
    (tmp_path / "killed-seed0-0123456789" / "metrics.json").unlink()
    for folder in (tmp_path, tmp_path / "not there yet"):
        ((first, second),) = (g.runs for g in plan("permuted-digits", "fot", "0..1", folder, overrides=FEW))
        own = folder / f"fot-seed0-{digest(first.config)}"
        assert first.folder == (tmp_path / "fot-seed0-0123456789" if folder == tmp_path else own) != second.folder
        assert second.folder == folder / f"fot-seed1-{digest(second.config)}"
    assert list(finished_in(tmp_path)) == [tmp_path / "fot-seed0-0123456789"]


def test_a_run_with_objects_from_python_is_not_taken_for_the_planned_one(tmp_path):
    """Its config.yaml names the method that the strategy has replaced."""
    config = cfl.resolve("permuted-digits", method="fedavg", overrides=FEW)
    cfl.run(config, output=tmp_path / "plain")
    cfl.run(config, strategy=FOT(), output=tmp_path / "mine")
    assert list(finished(tmp_path).values()) == list(finished_in(tmp_path)) == [tmp_path / "plain"]


def test_a_run_that_has_gone_on_with_later_tasks_is_not_taken_for_the_planned_one(tmp_path):
    """The folder is named after the options with which the run began."""

    def planned(tasks: int):
        options = [f"tasks={tasks}", "rounds=1", "model.hidden=[8]", "partition.clients=4"]
        ((run,),) = (group.runs for group in plan("permuted-digits", "fedavg", "0", tmp_path, overrides=options))
        return run

    first, longer = planned(2), planned(3)
    cfl.run(first.config, output=first.folder)
    assert planned(2).results() is not None
    cfl.run(longer.config, output=first.folder, resume=True)
    assert planned(3).folder == first.folder  # found by its content
    with pytest.raises(ConfigError, match="holds the results of another run .*: tasks=3 there, tasks=2 here"):
        planned(2)


def test_a_run_without_stored_seconds_is_finished(tmp_path):
    (run,) = plan("permuted-digits", "fedavg", "0", tmp_path)[0].runs
    run.folder.mkdir()
    (run.folder / "metrics.json").write_text('{"acc": 0.5}')
    assert run.results() == {"acc": 0.5, "timing": {}}
    (run.folder / "timing.json").write_text('{"clients": {"train": 1, "gpse": 2}, "server": {"train": 4}}')
    assert (run.results()["client_seconds"], run.results()["server_seconds"]) == (3, 4)


def test_paired_differences_are_those_of_a_paired_t_test():
    ours, theirs = np.array([0.8, 0.9, 0.7, 0.85]), np.array([0.7, 0.85, 0.72, 0.7])
    runs = [[{"seed": seed, "acc": one, "fgt": None} for seed, one in enumerate(each)] for each in (ours, theirs)]
    runs[1].append({"seed": 9, "acc": 0.1, "fgt": None})  # a seed that only the other runs have
    found = paired.differences(runs[0], runs[1][::-1])
    reference = stats.ttest_rel(ours, theirs)
    low, high = reference.confidence_interval(0.95)
    expected = {"mean": (ours - theirs).mean(), "low": low, "high": high, "p": reference.pvalue}
    assert found["acc"] == pytest.approx(expected) and found["seeds"] == [0, 1, 2, 3]
    assert np.isnan(list(found["fgt"].values())).all()
    assert paired.differences(runs[0][:1], runs[1]) is None


@pytest.mark.parametrize("seeds", [2, 3])
def test_equal_differences_are_no_evidence(seeds):
    """Their deviation is 0, so a t-test would find any difference, also of a rounding error, to be significant."""
    runs = [{"seed": seed, "acc": 0.7 + seed / 10, "fgt": 0.1} for seed in range(seeds)]
    better = [{**run, "acc": run["acc"] - 0.25, "fgt": 0.1 + 1e-17 + 2e-16} for run in runs]
    found = paired.differences(runs, better)
    assert paired.cells(found["acc"]) == ["+25.0", "–", "–"] and paired.cells(found["fgt"]) == [
        "+0.0",
        "+0.0 to +0.0",
        "1.000",
    ]
    assert not any(paired.marked([runs, better, better]).values())  # the best is not told apart from any other


def test_one_process_at_a_time_owns_a_folder(tmp_path):
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run" / "rounds.jsonl").touch()
    assert RunFolder.busy(tmp_path / "run") and not RunFolder.busy(tmp_path)
    for resume in (True, False):
        with pytest.raises(Busy, match=f"process {os.getpid()} uses '.*run'; wait for it, or choose another --output"):
            RunFolder(tmp_path / "run", resume=resume)
    folder.close()
    assert not RunFolder.busy(tmp_path / "run")
    RunFolder(tmp_path / "run", resume=True).close()


def command(folder):
    return [
        *(sys.executable, "-c", "from cfl.cli import main; main()", "compare", "permuted-digits", *OPTIONS),
        *("--methods", "fedavg,fot", "--seeds", "0..1", "--no-plot", "--output", str(folder)),
    ]


def results(folder):
    """Accuracy matrix by run, after a check that rounds.jsonl has one line per round."""
    found = {}
    for path in sorted(folder.glob("*-seed*")):
        lines = [json.loads(line) for line in (path / "rounds.jsonl").read_text().splitlines()]
        trained = [(line["task"], line["round"]) for line in lines if line["phase"] == "train"]
        assert trained == [(task, number) for task in range(2) for number in range(3)]
        found[path.name] = json.loads((path / "metrics.json").read_text())["accuracy_matrix"]
    return found


@pytest.mark.slow
def test_a_comparison_that_is_killed_or_started_twice_has_the_same_results(tmp_path):
    groups = plan("permuted-digits", "fedavg,fot", "0..1", tmp_path / "whole", overrides=FEW)
    assert run_all([run for group in groups for run in group.runs], jobs=1, quiet=True) == {}
    whole = results(tmp_path / "whole")
    assert len(whole) == 4

    folder = tmp_path / "killed"
    process = subprocess.Popen(command(folder), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    while not list(folder.glob("*/rounds.jsonl")):  # during the first runs
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not (folder / "compare.json").exists()

    two = [subprocess.Popen([*command(folder), "--quiet"], stdout=subprocess.PIPE) for _ in range(2)]
    tables = [one.communicate()[0].decode() for one in two]
    assert [one.returncode for one in two] == [0, 0]
    assert tables[0] == tables[1] and "fot" in tables[0]
    assert results(folder) == whole
    assert list(json.loads((folder / "compare.json").read_text())["methods"]) == ["fedavg", "fot"]


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [False, True], ids=["at a prompt", "in the background of a script"])
def test_runs_end_with_the_comparison_that_started_them(tmp_path, ignored):
    handler = signal.SIG_IGN if ignored else signal.default_int_handler
    call = [*command(tmp_path), "--set", "rounds=5000", "--set", "checkpoint_every=5000", "--jobs", "1"]
    process = subprocess.Popen(
        call, stdout=subprocess.DEVNULL, preexec_fn=lambda: signal.signal(signal.SIGINT, handler)
    )
    while not (begun := [path.parent for path in tmp_path.glob("*/rounds.jsonl")]):
        assert process.poll() is None
        time.sleep(0.02)
    process.kill()
    process.wait()
    for _ in range(600):
        if not RunFolder.busy(begun[0]):
            break
        time.sleep(0.1)
    assert not RunFolder.busy(begun[0]) and not (begun[0] / "metrics.json").exists()
    assert list((begun[0] / "checkpoints").glob("*.safetensors"))  # saved after its round


def test_a_run_without_parent_process_is_interrupted_once(monkeypatch):
    """A second interrupt, from the message on the task, would come before the round is saved."""
    ours, theirs = multiprocessing.Pipe()
    ours.close()
    sent = []
    monkeypatch.setattr(signal, "raise_signal", sent.append)
    sink = parallel._PipeSink(theirs)
    for _ in range(2):
        sink.warn("text")
    assert sent == [signal.SIGINT]


@pytest.mark.parametrize("end", [EOFError, KeyboardInterrupt])
def test_a_process_that_ends_ignores_further_interrupts(end, monkeypatch):
    """The parent closes the channel, then interrupts what is still alive: a traceback would be all that comes of it."""
    monkeypatch.setattr(os, "setpgid", lambda *ids: None)
    monkeypatch.setattr(parallel.machine, "keep_memory", lambda: None)

    def closed() -> None:
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        raise end

    before = signal.getsignal(signal.SIGINT)
    try:
        parallel._serve(SimpleNamespace(recv=closed), None, False)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_tells_how_to_continue(tmp_path, monkeypatch, capsys):
    def interrupted(queue):
        raise KeyboardInterrupt

    monkeypatch.setattr(parallel._Queue, "work", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_all(plan("permuted-digits", "fedavg", "0", tmp_path)[0].runs, quiet=True)
    assert "each run is saved after its round; repeat the command" in capsys.readouterr().err


def test_a_process_that_ends_while_all_are_interrupted_does_not_keep_the_others_from_it(monkeypatch):
    """At the end of a comparison it was alive when asked, and is gone when it gets the signal."""
    sent, queue = [], parallel._Queue([], parallel.Board(0, 0, quiet=True), None, False)

    def kill(pid, number):
        if pid == 1:
            raise ProcessLookupError
        sent.append((pid, number))

    monkeypatch.setattr(parallel.os, "kill", kill)
    queue._processes += [SimpleNamespace(pid=pid, is_alive=lambda: True, join=lambda: None) for pid in (1, 2)]
    queue.stop()
    assert sent == [(2, signal.SIGINT)]


@pytest.mark.parametrize(
    ("runs", "jobs"),
    [
        ([{}], 8),
        ([{}, {"engine": "vmapped", "threads": 3}], 2),  # two runs of three threads keep six of eight cores busy
        ([{"threads": 16}], 1),
        ([{}, {"engine": "pool"}], 1),
        ([{}, {"engine": "auto"}], 1),
        ([{}, {"device": "cuda"}], 1),
        ([], 8),
    ],
    ids=str,
)
def test_runs_in_parallel_have_a_core_for_each_thread(runs, jobs, monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 8)
    assert default_jobs([RunConfig(benchmark="permuted-digits", **options) for options in runs]) == jobs


def test_a_run_that_fails_or_dies_does_not_stop_the_others(tmp_path):
    groups = plan("permuted-digits", "fedavg", "0..2", tmp_path, overrides=[*FEW, "rounds=200"])
    first, second, third = groups[0].runs
    first.folder.mkdir()
    (first.folder / "config.yaml").write_text("engine: [")
    short = replace(third, config=cfl.resolve("permuted-digits", overrides=FEW, seed=2))

    def kill() -> None:
        while not (second.folder / "rounds.jsonl").exists():
            time.sleep(0.02)
        for process in multiprocessing.active_children():
            process.kill()

    killer = threading.Thread(target=kill)
    killer.start()
    failed = run_all([first, second, short], jobs=1, quiet=True)
    killer.join()
    assert list(failed) == [first.name, second.name]
    assert "not valid YAML" in failed[first.name] and "ended with status -9" in failed[second.name]
    assert first.results() is None and second.results() is None and short.results()["method"] == "fedavg"


def test_a_run_is_repeated_after_its_tokenizer_has_changed(tmp_path):
    path, texts = tmp_path / "tokenizer.json", Texts([f"word{n} other{n}" for n in range(400)], None, [0] * 400)
    options = dict(overrides=[f"text.tokenizer={path}", "tasks=1", "rounds=1"], scale="smoke")
    for size in (60, 90):
        encoder(TextOptions(vocabulary=size), [texts])._tokenizer.save(str(path))
        (group,) = plan("split-topics", "fedavg", "0", tmp_path / "runs", **options)
        assert group.runs[0].results() is None
        cfl.run(group.runs[0].config, output=group.runs[0].folder)
        (group,) = plan("split-topics", "fedavg", "0", tmp_path / "runs", **options)
        assert group.runs[0].results() is not None
    path.unlink()
    (group,) = plan("split-topics", "fedavg", "0", tmp_path / "runs", **options)
    assert group.runs[0].results() is not None


def test_a_run_is_repeated_after_the_model_that_it_starts_from_has_changed(tmp_path):
    for rate in ("0.1", "0.2"):
        before = cfl.resolve("permuted-digits", overrides=[*small(), f"local.lr={rate}"])
        shutil.rmtree(tmp_path / "before", ignore_errors=True)
        cfl.run(before, output=tmp_path / "before")
        own = planned(tmp_path / "runs", f"start={tmp_path / 'before'}")
        assert own.results() is None
        cfl.run(own.config, output=own.folder)
        assert planned(tmp_path / "runs", f"start={tmp_path / 'before'}").results() is not None
    shutil.rmtree(tmp_path / "before")
    assert planned(tmp_path / "runs", f"start={tmp_path / 'before'}").results() is not None
