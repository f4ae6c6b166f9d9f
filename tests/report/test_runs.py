import json
import re
import shlex
import shutil
from dataclasses import replace
from html import escape
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import cfl
from cfl import cli
from cfl.assembly.resolve import dump
from cfl.config.overrides import assignment, parse
from cfl.core import ConfigError
from cfl.experiments.compare import finished, finished_in
from cfl.methods.regularizers import FedProx
from cfl.report import html
from cfl.report.repeat import command
from cfl.report.runs import FinishedRun, flat, read, scenes
from tests import toy


def made(method="fot", seed=0, benchmark="permuted-digits", **results):
    """Return a run with this configuration and these results, without running it."""
    overrides = results.pop("overrides", ())
    config = cfl.resolve(benchmark, method=method, seed=seed, overrides=overrides)
    metrics = {"method": config.label, "benchmark": benchmark, "seed": seed, "acc": 0.5, "fgt": 0.1}
    metrics |= {"accuracy_matrix": [[0.6, None], [0.5, 0.5]], **results}
    return FinishedRun(Path(f"{method}-{seed}"), metrics, flat(dump(config)), config)


def shown(found):
    return [(scene.setting, [(group.label, len(group.runs)) for group in scene.groups]) for scene in scenes(found)]


def test_runs_are_found_at_any_depth_and_unfinished_ones_named(stored):
    found = read([stored])
    assert [run.path.relative_to(stored).as_posix() for run in found.runs] == [
        "a/fot-seed0",
        "a/fot-seed1",
        "seed0",
        "seed1",
    ]
    assert found.unfinished == [stored / "killed"] and found.twice == found.failed == {}
    assert all(run.rounds and run.timing["clients"] and run.config for run in found.runs)


def test_a_folder_counts_once_and_so_does_a_repeated_run(stored, tmp_path):
    shutil.copytree(stored / "seed0", tmp_path / "again")
    found = read([stored / "seed0", stored, tmp_path])
    assert len(found.runs) == 4 and found.twice == {tmp_path / "again": stored / "seed0"}


def test_a_folder_without_runs_is_named(stored, tmp_path):
    (tmp_path / "config.yaml").write_text("name: of something else\n")
    with pytest.raises(ConfigError, match=f"'{tmp_path}' contains no run"):
        read([stored, tmp_path])
    with pytest.raises(ConfigError, match="'nowhere' contains no run"):
        read([Path("nowhere")])


def test_the_printed_command_finishes_a_killed_run_in_its_folder(stored, tmp_path):
    folder = tmp_path / "my runs" / "killed"
    shutil.copytree(stored / "killed", folder)
    with pytest.raises(ConfigError, match="no run is finished in '.*killed'") as caught:
        read([tmp_path])
    name, *words = shlex.split(str(caught.value).partition("continue with: ")[2])
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--quiet", "--no-plot"])
    assert (name, stop.value.code) == ("cfl-run", 0)
    assert [run.path for run in read([tmp_path]).runs] == [folder]
    shutil.copytree(stored / "killed", tmp_path / "a")
    shutil.copytree(stored / "killed", tmp_path / "b")
    with pytest.raises(ConfigError, match=r"/a --resume, or repeat the command that began them all$"):
        read([tmp_path / "a", tmp_path / "b"])


def test_an_unfinished_run_with_a_damaged_file_does_not_end_the_report(stored, tmp_path):
    """The command that continues it names the file."""
    shutil.copytree(stored, tmp_path / "runs")
    cut = tmp_path / "runs" / "cut"
    cfl.run(cfl.resolve("permuted-digits", overrides=["tasks=2", "rounds=1", "partition.clients=2"]), output=cut)
    (cut / "metrics.json").unlink()
    (cut / "model.json").write_text("{")
    found = read([tmp_path / "runs"])
    assert cut in found.unfinished and f"--output {cut} --resume" in html.page(found, date="")


def test_a_failed_run_is_told_from_an_unfinished_one(stored, tmp_path):
    shutil.copytree(stored / "killed", tmp_path / "failed")
    error = {"error": "OSError", "message": "the disk is full", "task": 0, "phase": "train", "round": 2}
    (tmp_path / "failed" / "error.json").write_text(json.dumps(error))
    with pytest.raises(
        ConfigError, match="no run is finished in '.*failed'; '.*failed' failed: OSError: the disk is full"
    ):
        read([tmp_path])
    found = read([stored, tmp_path])
    assert found.failed == {tmp_path / "failed": error} and found.unfinished == [stored / "killed"]
    (tmp_path / "failed" / "metrics.json").write_text((stored / "seed0" / "metrics.json").read_text())
    assert read([tmp_path]).failed == {}  # a run with results is finished


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("metrics.json", "{", "metrics.json' is damaged"),
        ("metrics.json", "[]", "metrics.json' is damaged"),
        ("metrics.json", '{"method": "fot"}', r"metrics.json' is damaged \(benchmark: Field required\)"),
        ("model.json", '{"input_shape": 64}', r"model.json' is damaged \(input_shape: .* valid list\)"),
        ("rounds.jsonl", '{"task": 0}\n{"ta', "rounds.jsonl' is damaged"),
        ("timing.json", "", "timing.json' is damaged"),
        ("made_of.json", '{"run": ["a hash"]}', "made_of.json' is damaged"),
    ],
)
def test_damaged_files_are_named(stored, tmp_path, name, text, fault):
    shutil.copytree(stored / "seed0", tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    with pytest.raises(ConfigError, match=fault):
        read([tmp_path])


def test_a_run_whose_model_has_an_entry_of_a_newer_version_is_read(stored, tmp_path):
    shutil.copytree(stored / "seed0", tmp_path / "run")
    about = json.loads((tmp_path / "run/model.json").read_text())
    (tmp_path / "run/model.json").write_text(json.dumps({**about, "later": 1}))
    assert [run.path for run in read([tmp_path]).runs] == [tmp_path / "run"]


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("config.yaml", "method: [fot\n", "the configuration '{}' is not valid YAML at line 2"),
        ("metrics.json", "{", "'{}' is damaged; move its folder away, then repeat the run"),
        ("rounds.jsonl", '{"ta', "'{}' is damaged; repeat the run, or move the file away"),
        ("rounds.jsonl", '{"task": 0, "phase": "train"}', "'{}' is damaged; repeat the run, or move the file away"),
    ],
)
def test_a_damaged_run_among_others_is_left_out_and_named(stored, tmp_path, name, text, fault):
    shutil.copytree(stored / "seed0", tmp_path / "run")
    (tmp_path / "run" / name).write_text(text)
    fault = fault.format(tmp_path / "run" / name)
    with pytest.warns(UserWarning, match=f"^a run is left out: {fault}$"):
        found = read([stored / "seed1", tmp_path])
    assert [run.path for run in found.runs] == [stored / "seed1"] and found.damaged == {tmp_path / "run": fault}
    assert f"A run is left out: {escape(fault)}" in html.page(found, date="")


@pytest.mark.parametrize(
    ("name", "entry", "value"),
    [
        ("metrics.json", "seed", [0]),
        ("metrics.json", "bytes_by_phase", []),
        ("metrics.json", "by_task", [[0.5]]),
        ("metrics.json", "callbacks", {"Mine": [1.0]}),
        ("model.json", "regularizers", 3),
        ("timing.json", "clients", [0.1]),
    ],
)
def test_an_entry_of_another_type_leaves_the_run_out(stored, tmp_path, name, entry, value):
    shutil.copytree(stored / "seed0", tmp_path / "run")
    path = tmp_path / "run" / name
    path.write_text(json.dumps({**json.loads(path.read_text()), entry: value}))
    with pytest.warns(UserWarning, match=rf"^a run is left out: '{path}' is damaged \({entry}"):
        found = read([stored / "seed1", tmp_path])
    assert [run.path for run in found.runs] == [stored / "seed1"] and "A run is left out" in html.page(found, date="")


def test_results_alone_are_enough(stored, tmp_path):
    for name in ("config.yaml", "metrics.json"):
        shutil.copy(stored / "seed0" / name, tmp_path / name)
    (tmp_path / "machine.json").write_text('{"date": "2026-11-21"}')
    (run,) = read([tmp_path]).runs
    assert (run.rounds, run.timing, run.machine) == ([], {}, {"date": "2026-11-21"})


def test_a_method_of_another_package_need_not_be_installed(stored, tmp_path):
    shutil.copytree(stored / "seed0", tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("method: fedavg", "method: theirs"))
    (run,) = read([tmp_path]).runs
    assert run.config is None and run.options["method"] == "theirs" and run.options["model.hidden"] == [8]


def test_options_that_a_run_of_an_unknown_method_is_older_than_have_their_defaults(stored, tmp_path):
    for name, method in (("old", "theirs"), ("new", "theirs-too")):
        shutil.copytree(stored / "seed0", tmp_path / name)
        for file in (tmp_path / name / "config.yaml", tmp_path / name / "metrics.json"):
            file.write_text(file.read_text().replace("fedavg", method))
    path = tmp_path / "old" / "config.yaml"
    old = yaml.safe_load(path.read_text())
    del old["validation"], old["attack"], old["model"]["adapter"]  # three options of later versions
    path.write_text(yaml.safe_dump(old))
    assert shown(read([tmp_path]).runs) == [("", [("theirs", 1), ("theirs-too", 1)])]


def test_groups_ignore_the_seed_and_options_of_computation():
    fast = ("engine=pool", "workers=2", "checkpoint_every=5", "device=auto", "flower.deadline=60")
    found = [made(seed=1), made(seed=0, overrides=fast), made("fedavg")]
    assert shown(found) == [("", [("fedavg", 1), ("fot", 2)])]
    assert [run.metrics["seed"] for run in scenes(found)[0].groups[1].runs] == [0, 1]


def test_the_scenario_of_a_stream_and_the_same_one_as_an_option_are_one_group():
    found = [
        replace(made("fedavg", seed=seed, overrides=options), scenario="domain")
        for seed, options in enumerate(([], ["scenario=domain"]))
    ]
    assert shown(found) == [("", [("fedavg", 2)])]


def test_a_label_has_the_options_that_differ_sorted_by_number():
    found = [made(overrides=[f"strategy.threshold={value}"]) for value in (0.99, 1.0, 0.5)] + [made("gpm")]
    labels = [f"fot (strategy.threshold={value})" for value in (0.5, 0.99, 1.0)]
    assert shown(found) == [("", [(label, 1) for label in [*labels, "gpm"]])]


def test_settings_with_several_methods_are_separate_scenes():
    found = [made(m, overrides=[f"partition.name={p}"]) for p in ("shards", "iid") for m in ("fot", "fedavg")]
    groups = [("fedavg", 1), ("fot", 1)]
    assert shown(found) == [("partition.name=iid", groups), ("partition.name=shards", groups)]
    alone = [run for run in found if run.metrics["method"] == "fot"]
    labels = ["fot (partition.name=iid)", "fot (partition.name=shards)"]
    assert shown(alone) == [("", [(label, 1) for label in labels])]


def test_an_option_of_the_method_that_follows_from_the_setting_is_no_label():
    """The preset of permuted-mnist gives fot 0.94 for iid and 0.96 for shards."""
    setups = [(m, p) for p in ("iid", "shards") for m in ("fot", "fedavg")]
    found = [made(m, benchmark="permuted-mnist", overrides=[f"partition.name={p}"]) for m, p in setups]
    assert {run.options.get("strategy.threshold") for run in found} == {0.94, 0.96, None}
    assert [label for _, groups in shown(found) for label, _ in groups] == ["fedavg", "fot"] * 2


def test_an_option_that_the_preset_chooses_by_method_is_no_setting():
    """The preset sets per-task statistics for EWC, which needs per-sample gradients, and batch statistics otherwise."""
    ewc, fot, fedavg = (made(method, benchmark="split-tiny-imagenet100") for method in ("ewc", "fot", "fedavg"))
    assert [run.options["model.norm_stats"] for run in (ewc, fot, fedavg)] == ["per_task", "batch", "batch"]
    usual = [("ewc", 1), ("fedavg", 1), ("fot", 1)]
    assert shown([ewc, fot, fedavg]) == [("", usual)]
    own = ["model.norm_stats=per_task"]
    chosen = [made(method, benchmark="split-tiny-imagenet100", overrides=own) for method in ("fot", "fedavg")]
    found = dict(shown([ewc, fot, fedavg, *chosen]))
    assert found == {"": usual, "model.norm_stats=per_task": [("fedavg", 1), ("fot", 1)]}


def test_a_learning_rate_that_each_method_has_for_itself_is_no_setting():
    methods = (("fedavg", "0.3"), ("fot", "0.1"), ("gpm", "0.1"))
    found = [
        made(method, overrides=[f"local.lr={lr}", f"partition.name={partition}"])
        for method, lr in methods
        for partition in ("iid", "shards")
    ]
    groups = [("fedavg (local.lr=0.3)", 1), ("fot", 1), ("gpm", 1)]  # two of three methods have 0.1
    assert shown(found) == [("partition.name=iid", groups), ("partition.name=shards", groups)]
    alone = found[0], found[2]
    assert shown(alone) == [("", [("fedavg (local.lr=0.3)", 1), ("fot (local.lr=0.1)", 1)])]
    other = made("fot", overrides=["local.lr=0.3", "partition.name=iid"])  # now fot has two, so they are settings
    assert [setting for setting, _ in shown([*alone, other])] == ["local.lr=0.3", "local.lr=0.1"]


def test_a_value_shared_by_most_settings_is_omitted():
    options = [("local.lr=0.1",), ("local.lr=0.2",), ("local.lr=0.2", "cohort=5")]
    found = [made(method, overrides=own) for own in options for method in ("fot", "fedavg")]
    # cohort is 10 in two of three, local.lr 0.2 in two of three
    assert [setting for setting, _ in shown(found)] == ["cohort=5", "local.lr=0.1", ""]


def test_comparisons_come_before_single_runs():
    found = [made("fot", overrides=["cohort=3"]), *(made(m, benchmark="split-digits") for m in ("fedavg", "fot"))]
    found += [made(m, overrides=["cohort=5"]) for m in ("fedavg", "fot")]
    assert [(s.benchmark, s.setting, len(s.groups)) for s in scenes(found)] == [
        ("permuted-digits", "cohort=5", 2),
        ("split-digits", "", 2),
        ("permuted-digits", "cohort=3", 1),
    ]


def test_benchmarks_are_separate_scenes():
    found = [made(benchmark=name) for name in ("split-digits", "permuted-digits")]
    assert [(scene.benchmark, len(scene.groups)) for scene in scenes(found)] == [
        ("permuted-digits", 1),
        ("split-digits", 1),
    ]


@pytest.mark.parametrize(
    ("benchmark", "layers", "words"),
    [
        ("permuted-digits", {"method": "fot"}, ["--method", "fot", "--seed", "0"]),
        ("permuted-digits", {"method": "fedsol", "seed": 7}, ["--method", "fedsol", "--seed", "7"]),
        ("permuted-digits", {"scale": "smoke"}, ["--method", "fedavg", "--seed", "0", "--scale", "smoke"]),
        (
            "permuted-mnist",  # the preset has another threshold for shards
            {"method": "fot", "overrides": ["partition.name=shards"]},
            ["--method", "fot", "--seed", "0", "--set", "partition.name=shards"],
        ),
        (
            "permuted-mnist",
            {"method": "fot", "overrides": ["partition.name=shards", "strategy.threshold=0.94"]},
            ["--method", "fot", "--seed", "0", "--set", "partition.name=shards", "--set", "strategy.threshold=0.94"],
        ),
        (
            "permuted-digits",
            {"method": "fot+fedprox", "overrides": ["rounds=[2,1]", "tasks=2", "regularizer.fedprox.mu=1e-5"]},
            ["--method", "fot+fedprox", "--seed", "0"]
            + ["--set", "tasks=2", "--set", "rounds=[2,1]", "--set", "regularizer.fedprox.mu=1e-05"],
        ),
        (
            "permuted-digits",
            {
                "overrides": ["model.hidden=[8]", "public.name=mnist", "dp.target_epsilon=1", "dp.amplify=false"]
                + ["agg.weights=uniform"]
            },
            ["--method", "fedavg", "--seed", "0", "--set", "model.hidden=[8]", "--set", "agg.weights=uniform"]
            + ["--set", "public.name=mnist", "--set", "dp.target_epsilon=1.0", "--set", "dp.amplify=false"],
        ),
    ],
)
def test_the_command_is_the_shortest_that_gives_the_configuration(benchmark, layers, words):
    config = cfl.resolve(benchmark, **layers)
    assert command(config) == ["cfl-run", "train", benchmark, *words]


def test_the_command_names_the_files_of_plugins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "none_of_mine.py"
    file.write_text("")
    monkeypatch.setenv("CFL_PLUGINS", str(file))
    words = ["--plugin", str(file), "train", "permuted-digits", "--method", "fedavg", "--seed", "0"]
    assert command(cfl.resolve("permuted-digits")) == ["cfl-run", *words]


def test_a_command_without_the_folder_of_weights_gives_its_configuration_once_the_folder_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "bert", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2}
    config |= {"intermediate_size": 16, "vocab_size": 100, "hidden_dropout_prob": 0.1}
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text(json.dumps(config))
    save_file({"embeddings.word_embeddings.weight": torch.zeros(100, 8)}, tmp_path / "bert" / "model.safetensors")
    monkeypatch.chdir(tmp_path)
    run = cfl.resolve("split-topics", overrides=["model.weights=bert", "text.tokenizer=words.json"])
    assert "model.width=8" not in command(run)
    (tmp_path / "bert").rename("elsewhere")
    words = command(run)
    assert "model.weights=bert" in words and "model.width=8" in words
    (tmp_path / "elsewhere").rename("bert")
    assert cfl.resolve("split-topics", overrides=[word for word in words if "=" in word]) == run


def test_an_option_that_cannot_be_removed_leaves_no_command():
    config = cfl.resolve("permuted-digits")
    bare = config.model_copy(update={"model": config.model.model_copy(update={"options": {}})})
    assert command(bare) is None  # the preset has model.hidden, and --set removes nothing


def test_assignments_are_read_back_as_the_same_values():
    for value in ("shards", "1e-5", "null", "", None, True, 1e-05, [1, 2], ["crop"], "a b"):
        assert parse([assignment("a.b", value)]) == {"a": {"b": value}}


def test_seconds_of_clients_and_server_are_sums_over_phases(stored):
    (group,) = scenes(read([stored / "seed0"]).runs)[0].groups
    timing = json.loads((stored / "seed0" / "timing.json").read_text())
    (row,) = group.metrics
    assert row["client_seconds"] == sum(timing["clients"].values())
    assert row["server_seconds"] == sum(timing["server"].values())


def test_a_run_that_a_callback_stopped_is_neither_a_repeat_nor_of_the_group_of_the_others(tmp_path):
    class Once(cfl.Callback):
        def stop(self, rows):
            return "phase"

    config = cfl.resolve(
        "permuted-digits", overrides=["tasks=2", "rounds=2", "model.hidden=[8]", "partition.clients=4"]
    )
    cfl.run(config, output=tmp_path / "whole")
    cfl.run(config, output=tmp_path / "stopped", callbacks=[Once()])
    found = read([tmp_path])
    assert found.twice == {} and shown(found.runs) == [("", [("fedavg (stopped by Once)", 1), ("fedavg", 1)])]
    assert list(finished_in(tmp_path)) == list(finished(tmp_path).values()) == [tmp_path / "whole"]


def test_runs_with_objects_of_the_users_own_are_groups_of_their_own(tmp_path):
    """Options say nothing of them: two networks, two values of a strategy's field, and the preset's network."""

    class Halved(cfl.Strategy):
        factor: float

        def __init__(self, factor):
            self.factor = factor

    options = ["tasks=2", "rounds=1", "model.hidden=[8]", "partition.clients=2"]
    for seed in (0, 1):
        config = cfl.resolve("permuted-digits", overrides=options, seed=seed)
        for width in (4, 6):
            net = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
            cfl.run(config, model=net, output=tmp_path / f"net-{width}-{seed}")
        for factor in (0.1, 2.0):
            cfl.run(config, strategy=Halved(factor), output=tmp_path / f"strategy-{factor}-{seed}")
        for mu in (0.001, 5.0):
            cfl.run(config, regularizers={"near": FedProx(mu)}, output=tmp_path / f"regularizer-{mu}-{seed}")
            named = cfl.resolve("permuted-digits", method="fedavg+fedprox", overrides=options, seed=seed)
            cfl.run(named, regularizers={"fedprox": FedProx(mu)}, output=tmp_path / f"replaced-{mu}-{seed}")
        cfl.run(config, output=tmp_path / f"plain-{seed}")
    found = read([tmp_path])
    assert found.twice == {} and len(found.runs) == 18
    groups = [group for scene in scenes(found.runs) for group in scene.groups]
    kinds = [{run.path.name.rpartition("-")[0] for run in group.runs} for group in groups]
    assert sorted(map(min, kinds)) == [
        "net-4", "net-6", "plain", "regularizer-0.001", "regularizer-5.0", "replaced-0.001", "replaced-5.0",
        "strategy-0.1", "strategy-2.0",
    ]  # fmt: skip
    assert all(len(kind) == 1 for kind in kinds) and len({group.label for group in groups}) == 9
    page = html.page(found, date="")
    assert page.count("; repeat it by your program") == 8
    own = ["network (Sequential)", "regularizers (near)", "regularizers (fedprox)"]
    assert [page.count(f": has its own {what}; repeat") for what in own] == [2, 2, 2]
    assert "--plugin" not in page


def test_runs_on_other_data_are_groups_of_their_own(tmp_path):
    """Streams of one name, whose options say nothing of their data, with two seeds each; one run is there twice."""
    for spread in (1.0, 3.0):
        x = spread * torch.arange(48.0).reshape(24, 2)
        y = torch.arange(24) % 2
        tasks = [(x + 5 * task, y, x[:4], y[:4]) for task in (0, 1)]
        stream = cfl.from_tensors(tasks, name="own-points")
        for seed, folder in ((0, "a"), (1, "b"), (0, "again")):
            config = cfl.resolve(
                "own-points",
                overrides=["rounds=1", "local.batch_size=4", "model.hidden=[4]", "partition.clients=2"],
                seed=seed,
            )
            cfl.run(config, stream=stream, output=tmp_path / f"{spread}" / folder)
    found = read([tmp_path])
    assert {folder: first.name for folder, first in found.twice.items()} == {
        tmp_path / "1.0/again": "a", tmp_path / "3.0/again": "a",
    }  # fmt: skip
    (scene,) = scenes(found.runs)
    assert [{run.path.parent.name for run in group.runs} for group in scene.groups] in (
        [{"1.0"}, {"3.0"}], [{"3.0"}, {"1.0"}],
    )  # fmt: skip
    assert [len(group.runs) for group in scene.groups] == [2, 2]
    assert all(re.fullmatch(r"fedavg \(data=hash-[0-9a-f]{6}\)", group.label) for group in scene.groups)
    page = html.page(found, date="")
    assert page.count(": has its own stream (own-points); repeat it by your program") == 2
    assert "cfl-run --plugin FILE report" in page and "cfl-run train" not in page


def own_points(tasks=2, shift=0.0):
    x, y = torch.arange(48.0).reshape(24, 2) + shift, torch.arange(24) % 2
    return cfl.from_tensors([(x + 5 * task, y, x[:4], y[:4]) for task in range(tasks)], name="own-points")


def trained_on(stream, seed, folder):
    options = ["rounds=1", "local.batch_size=4", "model.hidden=[4]", "partition.clients=2"]
    cfl.run(cfl.resolve("own-points", overrides=options, seed=seed), stream=stream, output=folder)


def test_runs_on_fewer_tasks_of_a_stream_are_a_group_of_their_own(tmp_path):
    """As after a run has gone on with later tasks, and those of other seeds have not."""
    for seed, tasks in enumerate((2, 3, 2)):
        trained_on(own_points(tasks), seed, tmp_path / str(seed))
    (tmp_path / "begun").mkdir()
    shutil.copy(tmp_path / "0" / "config.yaml", tmp_path / "begun")
    found = read([tmp_path])
    assert shown(found.runs) == [("", [("fedavg (tasks=2)", 2), ("fedavg (tasks=3)", 1)])]
    page = html.page(found, date="")
    assert "own-points, fedavg, seed 0" in page and "tasks=null" not in page


def test_a_run_repeated_on_other_data_leaves_the_other_seeds_together(tmp_path):
    """Each seed has data of its own, as with permuted pixels; seed 0 has run twice."""
    for seed in range(3):
        trained_on(own_points(shift=seed), seed, tmp_path / f"{seed}")
    trained_on(own_points(shift=9), 0, tmp_path / "0-again")
    groups = [group for scene in scenes(read([tmp_path]).runs) for group in scene.groups]
    assert sorted(sorted(run.path.name for run in group.runs) for group in groups) == [["0"], ["0-again"], ["1", "2"]]
    assert len({group.label for group in groups}) == 3


def test_a_stream_with_the_name_of_another_benchmark_gets_no_command(tmp_path):
    """The command would train on the benchmark of the options, permuted-digits, which the run has not seen."""
    config = cfl.resolve("permuted-digits", overrides=["tasks=2", "rounds=1", "partition.clients=2"])
    cfl.run(config, stream=replace(toy.stream(2), name="split-digits"), output=tmp_path)
    page = html.page(read([tmp_path]), date="")
    assert ": has its own stream (split-digits); repeat it by your program" in page and "cfl-run train" not in page


def test_the_name_of_a_stream_does_not_end_the_comment_that_it_stands_in(tmp_path):
    config = cfl.resolve("permuted-digits", overrides=["tasks=2", "rounds=1", "partition.clients=2"])
    cfl.run(config, stream=replace(toy.stream(2), name="own\nls"), output=tmp_path)
    assert ": has its own stream (own ls); repeat it by your program" in html.page(read([tmp_path]), date="")


def test_the_scenario_is_always_named_where_runs_differ_in_it(tmp_path):
    for scenario, rounds in (("class", 1), ("class", 2), ("task", 1)):
        options = [f"scenario={scenario}", f"rounds={rounds}", "tasks=2", "model.hidden=[8]", "partition.clients=2"]
        cfl.run(cfl.resolve("split-digits", overrides=options), output=tmp_path / f"{scenario}-{rounds}")
    settings = [scene.setting for scene in scenes(read([tmp_path]).runs)]
    labels = [group.label for scene in scenes(read([tmp_path]).runs) for group in scene.groups]
    assert all("scenario=" in setting + label for setting in settings for label in labels)


def test_the_project_in_the_folder_of_a_served_run_is_no_run(stored, tmp_path):
    project = pytest.importorskip("cfl.flower.project", reason="the extra flower is not installed")
    shutil.copytree(stored / "seed0", tmp_path / "served")
    config = cfl.resolve(file=stored / "seed0" / "config.yaml")
    project.write(config, tmp_path / "served")
    inside = tmp_path / "served" / "inside"  # a run of the user's
    shutil.copytree(stored / "seed1", inside)
    found = read([tmp_path])
    assert [run.path for run in found.runs] == [tmp_path / "served", inside] and found.unfinished == []
    with pytest.raises(ConfigError, match="contains no run"):
        read([tmp_path / "served" / "flower"])
