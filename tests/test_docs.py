"""The documentation holds: its Python runs as written, its commands parse, its links exist, its tables agree."""

import ast
import itertools
import json
import math
import re
import shlex
from collections import defaultdict
from dataclasses import fields
from decimal import Decimal
from inspect import isfunction
from pathlib import Path
from statistics import mean, median, pstdev, stdev

import click
import numpy as np
import pytest
import typer
from scipy import stats
from torch import nn

import cfl
from cfl.assembly.resolve import resolve
from cfl.cli import app
from cfl.config.option_names import GROUPS, option_names
from cfl.config.overrides import read_yaml
from cfl.config.schema import RunConfig
from cfl.contract import Ctx, LocalRegularizer, RoundInfo
from cfl.core import options, plugins, tree
from cfl.experiments import reproduce
from cfl.experiments.compare import alone, plan
from cfl.methods.strategies.fot import FOT
from cfl.report.paired import differences
from cfl.testing import toy_config, toy_stream
from tests import toy

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "benchmarks/results/runs"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def blocks(page: Path, language: str) -> list[str]:
    return [code for name, code in FENCE.findall(page.read_text(encoding="utf-8")) if name == language]


def prose(page: Path) -> str:
    return FENCE.sub("", page.read_text(encoding="utf-8"))


def rows(page: Path, *, after: str) -> list[list[str]]:
    """Cells of the first table below a line that starts with `after`, without its head."""
    below = page.read_text(encoding="utf-8").partition(f"\n{after}")[2]
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table, f"no table below {after!r} in {page.name}"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[0].splitlines()[2:]]


def commands(page: Path) -> list[list[str]]:
    """Arguments of each cfl-run in the page's shell blocks."""
    lines = [re.split("#| > ", line)[0] for block in blocks(page, "") for line in block.splitlines()]
    return [shlex.split(line)[1:] for line in lines if re.match(r"(\.venv/bin/)?cfl-run ", line)]


@pytest.fixture
def own_registries(monkeypatch):
    """What the pages register stays out of the other tests."""
    for registry in (plugins.strategies, plugins.local, plugins.benchmarks, plugins.models):
        registry.names()  # the built-ins register on import, which must not happen in the copy
        monkeypatch.setattr(registry, "_items", dict(registry._items))


LONG = [ROOT / "docs" / f"{name}.md" for name in ("write-a-strategy", "privacy", "callbacks")]


@pytest.mark.parametrize("page", toy.quick(*(page for page in PAGES if page not in LONG), of=PAGES), ids=str)
def test_python_of_a_page_runs_as_written(page, tmp_path, monkeypatch, own_registries):
    """A page is one program: its blocks run in order, in one namespace, in an empty folder."""
    code = blocks(page, "python")
    if not code:
        pytest.skip("no Python on this page")
    results, original = [], cfl.run

    def run(*args, **kwargs):
        results.append(original(*args, **kwargs))
        return results[-1]

    monkeypatch.setattr(cfl, "run", run)
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": f"docs_{page.stem}"}
    for block in code:
        exec(compile(block, page.name, "exec"), namespace)
    # one accuracy for each pair of tasks tested on and learned before: the runs went to their end
    assert results or not any("cfl.run(" in block for block in code)
    assert all(result.accuracy_matrix.shape[0] >= 2 for result in results)
    for result in results:
        seen = result.accuracy_matrix[np.tril_indices(len(result.accuracy_matrix))]
        assert ((seen >= 0) & (seen <= 1)).all()


@each_page
def test_relative_links_and_images_exist(page):
    targets = re.findall(r"!?\[[^\]]*\]\(([^)]+)\)", prose(page))
    missing = [t for t in targets if "://" not in t and not (page.parent / t.partition("#")[0]).is_file()]
    assert targets or page.name not in ("README.md", "index.md")
    assert missing == []


def define(page: Path) -> None:
    """Register the classes of a page, as a file with them does that --plugin names."""
    nodes = ast.parse("\n".join(blocks(page, "python"))).body
    known = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom | ast.ClassDef)]
    exec(compile(ast.Module(known, []), str(page), "exec"), {"__name__": page.stem})


@each_page
def test_commands_parse_and_their_options_exist(page, own_registries):
    group = typer.main.get_command(app)
    assert isinstance(group, click.Group)
    found = commands(page)
    if not found:
        pytest.skip("no commands on this page")
    taken = set()
    for name, *args in found:
        if name == "--plugin":
            define(page)
            _, name, *args = args
        given = group.commands[name].make_context(name, list(args)).params  # raises on unknown flags
        if name in ("train", "compare") and given.get("config") is None:
            given["overrides"] = [text for text in given["overrides"] if not text.startswith("model.weights=")]
            if name == "compare":
                asked = [given[key] for key in ("benchmark", "methods", "seeds")]
                also = {key: given[key] for key in ("overrides", "vary", "grid", "scale")}
                configs = [run.config for group in plan(*asked, ROOT, **also) for run in group.runs]
            else:
                asked = {key: given[key] for key in ("method", "scale", "seed", "engine", "overrides")}
                configs = [resolve(given["benchmark"], regularizers=given["local"], **asked)]
                folder = given["output"] or Path("runs") / alone(*configs)
                assert folder not in taken or given["resume"], f"{folder} has the run of an earlier command"
                taken.add(folder)
            assert all(config.benchmark in plugins.benchmarks.names() for config in configs)
        if name == "describe":
            known = {
                n for r in (plugins.strategies, plugins.benchmarks, plugins.models, plugins.local) for n in r.names()
            }
            assert given["name"] in {*known, *GROUPS, *option_names()}


def test_fot_page_lists_each_option_with_its_default():
    table = {name.strip("`"): default for name, default, *_ in rows(ROOT / "docs/fot.md", after="## Options")}
    assert table == {row["name"]: str(row["default"]) for row in options.describe(FOT)}
    assert list(table) == [field.name for field in fields(FOT)]


def test_the_page_on_strategies_names_all_of_the_seam():
    page = ROOT / "docs/write-a-strategy.md"
    named = {cells[0].strip("`").partition("(")[0] for cells in rows(page, after="## Class attributes")}
    says = {name for name, kind in LocalRegularizer.__annotations__.items() if "ClassVar" in str(kind)}
    others = {"refuses", "borrows", "steps_see_state", "sees_each"}
    assert named == says | others
    for title, known in (("### ctx", Ctx._fields), ("### info", [field.name for field in fields(RoundInfo)])):
        told = [name for cells in rows(page, after=title) for name in re.findall(r"`(\w+)`", cells[0])]
        assert sorted(told) == sorted(known)
    bases = (LocalRegularizer, cfl.Strategy)
    hooks = {name for base in bases for name, value in vars(base).items() if isfunction(value) and name[0] != "_"}
    tables = "".join(line for line in page.read_text().splitlines() if line.startswith("|"))
    assert hooks - others <= set(re.findall(r"`(\w+)\(", tables))


def test_the_page_on_strategies_counts_who_overrides_the_five_hooks():
    page = ROOT / "docs/write-a-strategy.md"
    strategies = {name: (cfl.Strategy, plugins.strategies.get(name)) for name in plugins.strategies.names()}
    local = {name: (LocalRegularizer, plugins.local.get(name)) for name in plugins.local.names()}
    methods = {name: pair for name, pair in {**strategies, **local}.items() if name != "fedavg"}
    found = set()
    for cell, *_, count in rows(page, after="## Five hooks"):
        hooks = re.findall(r"`(\w+)\(", cell)
        own = {
            name
            for name, (base, method) in methods.items()
            if any(getattr(method, hook, None) is not getattr(base, hook, None) for hook in hooks)
        }
        assert len(own) == int(count)
        found |= own
    assert f"Of the {len(methods)} shipped methods other than FedAvg, {len(found)} override" in page.read_text()


def test_the_momentum_of_the_page_moves_running_statistics_as_fedavg_does(own_registries):
    """They kept their first values, since the momentum took their step for one without velocity."""
    define(ROOT / "docs/write-a-strategy.md")
    found = []
    for method in (cfl.Strategy(), plugins.strategies.get("server-momentum")(beta=0.0)):
        net = toy.net(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
        config = toy_config("model.norm_stats=running")
        found.append(cfl.run(config, strategy=method, stream=toy_stream(), model=net, progress=False).params)
    assert found[0]["1.running_mean"].any() and tree.equal(*found)
    assert plugins.local.get("momentum").turn == plugins.local.get("fedavgm").turn


def test_command_page_lists_each_option_with_its_default():
    table = {
        name.strip("`"): default
        for name, default, *_ in rows(ROOT / "docs/command-line.md", after="## Options for --set")
    }
    expected = {}
    for name, field in RunConfig.model_fields.items():
        inner = getattr(field.annotation, "model_fields", None)
        found = {f"{name}.{key}": item.default for key, item in inner.items()} if inner else {name: field.default}
        expected.update({key: "null" if default is None else str(default) for key, default in found.items()})
    # flags and groups with free keys are described in the text of the page
    aside = {"benchmark", "method", "regularizers", "seed", "engine", "strategy", "regularizer", "model.options"}
    assert table == {name: default for name, default in expected.items() if name not in aside}


def test_readme_and_pages_name_what_is_there():
    short = {kind: names.split(", ") for kind, names, _ in rows(ROOT / "README.md", after="## What is included")}
    kinds = {
        "method": (plugins.strategies, "methods.md", ("",)),
        "local regularizer": (plugins.local, "regularizers.md", ("",)),
        "benchmark": (plugins.benchmarks, "streams.md", ("## Benchmarks\n", "## Benchmarks of a single task")),
        "model": (plugins.models, "streams.md", ("## Models",)),
    }
    assert list(short) == list(kinds)
    for kind, (registry, page, titles) in kinds.items():
        cells = [cells[0] for title in titles for cells in rows(ROOT / "docs" / page, after=title)]
        for named in (short[kind], ", ".join(cells).split(", ")):
            assert sorted(name.strip("`") for name in named) == registry.names()


@pytest.mark.parametrize("partition", ["iid", "shards"])
@pytest.mark.parametrize("benchmark", ["permuted-digits", "split-digits"])
def test_results_of_the_methods_page_are_the_stored_ones(benchmark, partition):
    stored = json.loads((ROOT / f"benchmarks/results/baselines/{benchmark}-{partition}.json").read_text())["methods"]
    table = rows(ROOT / "docs/methods.md", after=f"### {benchmark}, {partition}")
    assert [cells[0].strip("`") for cells in table] == list(stored)
    for name, acc, fgt, up, down, kept, clients, server in table:
        run = stored[name.strip("`")]
        assert run["seeds"] == [0, 1, 2]
        for cell, score in ((acc, run["acc"]), (fgt, run["fgt"])):
            texts = [f"{100 * score[what]:.1f}" for what in ("mean", "std")] if score["mean"] is not None else []
            assert cell == (" ± ".join(texts) or "–")
        costs = [run[field]["mean"] / unit for field, unit in (("bytes_up", 1e6), ("bytes_down", 1e6))]
        costs += [run["client_bytes"]["mean"] / 1e3, run["client_seconds"]["mean"], run["server_seconds"]["mean"]]
        assert [up, down, kept, clients, server] == [f"{cost:.1f}" for cost in costs]


@pytest.mark.parametrize("stored", sorted((ROOT / "benchmarks/results/baselines").glob("*.json")), ids=lambda p: p.stem)
def test_what_the_methods_page_says_of_the_results_holds(stored):
    methods = json.loads(stored.read_text())["methods"]
    acc, fgt = ({name: run[score]["mean"] for name, run in methods.items()} for score in ("acc", "fgt"))
    without_samples = {"fedavg", "lwf", "ewc", "rgo", "gpm", "fot"}
    assert fgt["fot"] - min(fgt[name] for name in without_samples) <= methods["fot"]["fgt"]["std"]
    assert max(acc, key=acc.__getitem__) == "joint"
    assert methods["fot"]["client_bytes"]["mean"] == 0


def test_figures_of_the_page_on_choosing_are_the_stored_ones():
    """Those of the digits as stored, the others as in benchmarks/RESULTS.md, which a test compares with the runs."""
    methods, own = ("fedavg", "ewc", "er", "glfc", "gpm", "fot"), ROOT / "benchmarks/RESULTS.md"
    papers = "FL EWC+FL ER+FL GLFC GPM+FL FOT"
    expected = {"acc": [], "fgt": []}
    for partition in ("iid", "shards"):
        stored = json.loads((ROOT / f"benchmarks/results/baselines/permuted-digits-{partition}.json").read_text())
        for score, lines in expected.items():
            lines.append([100 * stored["methods"][name][score]["mean"] for name in methods])
    for title, acc, fgt, names in (  # with the columns of the scores, and the names of the rows
        *((f"**FOT, Table 1: PMNIST, {which}**", 2, 5, papers) for which in ("IID", "non-IID")),
        *((f"**FOT, Table 1: CIFAR100, {which}**", 2, 4, papers) for which in ("IID", "non-IID")),
        *((f"## {which}", 1, 2, " ".join(methods)) for which in ("five-datasets", "split-tiny-imagenet100")),
    ):
        found = {cells[0].strip("`"): cells for cells in rows(own, after=title)}
        for lines, column in zip(expected.values(), (acc, fgt), strict=True):
            scores = (found.get(name, {column: "–"})[column].strip("*") for name in names.split())
            lines.append([None if score == "–" else float(score.partition(" ")[0]) for score in scores])
    for lines, after in zip(expected.values(), ("ACC in percent after", "FGT of the same runs"), strict=True):
        shown = [cells[2:] for cells in rows(ROOT / "docs/choose-a-method.md", after=after)]
        assert shown == [["–" if value is None else f"{value:.1f}" for value in line] for line in lines]
    known = {score: [[v for v in line if v is not None] for line in lines] for score, lines in expected.items()}
    for fedavg, ewc, *_, fot in known["acc"]:  # what the page says of FOT, and of the two methods with samples
        assert fot > max(fedavg, ewc)
    for _, _, *stored, _, fot in known["fgt"]:
        assert fot < min(stored)
    assert all(line[-1] - min(line) <= 1 for line in known["fgt"])


def test_figures_of_the_pilot_study_are_the_stored_ones():
    stored = json.loads((ROOT / "benchmarks/results/pilot-study/iris.json").read_text())["methods"]
    table = rows(ROOT / "docs/regularizers.md", after="### The pilot study")
    assert [cells[0].strip("`") for cells in table] == list(stored)
    for name, *cells in table:
        found = [stored[name.strip("`")][what] for what in ("global", "local", "worst")]
        assert cells == [f"{100 * mean(values):.1f} ± {100 * pstdev(values):.1f}" for values in found]


def stored_rows(page: Path, stored: Path) -> list[tuple[dict, list[str]]]:
    """What a comparison has stored of each method, and the cells that the page shows of it, with the command."""
    found = json.loads(stored.read_text())
    assert f"{found['command']}\n" in page.read_text(encoding="utf-8")
    table = rows(page, after=f"### {stored.stem}")
    assert [cells[0].strip("`") for cells in table] == list(found["methods"])
    return [(found["methods"][name.strip("`")], cells) for name, *cells in table]


@pytest.mark.parametrize(
    "stored", sorted((ROOT / "benchmarks/results/regularizers").glob("*.json")), ids=lambda p: p.stem
)
def test_results_of_the_regularizers_page_are_the_stored_ones(stored):
    for run, cells in stored_rows(ROOT / "docs/regularizers.md", stored):
        scores = [run[score] for score in ("acc", "fgt") if run[score]["mean"] is not None]
        costs = [run[field]["mean"] / 1e6 for field in ("bytes_up", "bytes_down")]
        expected = [f"{100 * score['mean']:.1f} ± {100 * score['std']:.1f}" for score in scores]
        assert cells == [*expected, *(f"{cost:.1f}" for cost in costs)]


def test_the_readme_has_the_stored_scores_of_unequal_clients():
    found = json.loads((ROOT / "benchmarks/results/regularizers/permuted-digits-shards.json").read_text())["methods"]
    fedavg, fot = (
        "{mean:.1f} ± {std:.1f}".format(**{name: 100 * value for name, value in found[method]["acc"].items()})
        for method in ("fedavg", "fot")
    )
    assert f"ACC is {fedavg} for FedAvg and {fot} for FOT" in " ".join((ROOT / "README.md").read_text().split())


def test_what_the_regularizers_page_says_of_the_results_holds():
    def stored(name):
        return json.loads((ROOT / f"benchmarks/results/regularizers/{name}.json").read_text())["methods"]

    for name in ("mnist-lda", "mnist-sharding", "mnist-lda-public"):
        scores = {method: run["acc"]["mean"] for method, run in stored(name).items()}
        assert max(scores, key=scores.__getitem__) == ("fedproj" if "public" in name else "fedsol")
    curves = {method: run["accuracy_every_5_rounds"] for method, run in stored("mnist-lda").items()}
    means = {method: f"{100 * mean(mean(curve) for curve in runs):.1f}" for method, runs in curves.items()}
    assert means == {"fedsol": "87.9", "fedntd": "85.5", "fedprox": "82.9", "fedavg": "78.4"}
    for partition in ("iid", "shards"):
        for setting in ("", "-40-rounds", "-5-epochs"):
            runs = stored(f"permuted-digits-{partition}{setting}")
            assert runs["fot+fedsol"]["fgt"]["mean"] < runs["fot"]["fgt"]["mean"]


@pytest.mark.parametrize("stored", sorted((ROOT / "benchmarks/results/privacy").glob("*.json")), ids=lambda p: p.stem)
def test_results_of_the_privacy_page_are_the_stored_ones(stored):
    for run, cells in stored_rows(ROOT / "docs/privacy.md", stored):
        scores = [f"{100 * run[score]['mean']:.1f} ± {100 * run[score]['std']:.1f}" for score in ("acc", "fgt")]
        spent = f"{run['epsilon']['mean']:.2f}" if "epsilon" in run else "none"
        assert cells == [*scores, spent, *(f"{run[field]['mean'] / 1e6:.1f}" for field in ("bytes_up", "bytes_down"))]


def test_what_the_privacy_page_says_of_the_results_holds():
    folder = ROOT / "benchmarks/results/privacy"
    runs = {
        path.stem: {
            name: (run["acc"]["mean"], run["fgt"]["mean"])
            for name, run in json.loads(path.read_text())["methods"].items()
        }
        for path in folder.glob("*.json")
    }
    plain, frozen, noisy = (runs[f"split-cifar100-{name}"]["fot"] for name in ("plain", "frozen", "sketches"))
    fedavg = runs["split-cifar100-plain"]["fedavg"]
    assert plain[0] - frozen[0] < 0.01 and frozen[1] < 0  # freezing costs little
    assert abs(noisy[1] - fedavg[1]) < 0.01 < fedavg[1] - plain[1]  # under noise FOT forgets as FedAvg does
    for name in ("clients-1400", "clients-1400-private"):
        assert runs[name]["fot"][0] > runs[name]["fedavg"][0] and runs[name]["fot"][1] < runs[name]["fedavg"][1]


def test_figures_of_the_sketch_probe_are_the_stored_ones():
    found = json.loads((ROOT / "benchmarks/results/sketch-probe/probe.json").read_text())
    figures = ("range_error", "auc", "blind_auc", "noise_auc")
    assert rows(ROOT / "docs/privacy.md", after="## What a sketch gives away") == [
        [clients, f"{mean(run['range_recovered']):.0%}", *(f"{mean(run[name]):.2f}" for name in figures)]
        for clients, run in found["sum"].items()
    ]


def test_figures_of_the_secure_sum_are_the_stored_ones():
    stored = json.loads((ROOT / "benchmarks/results/secagg/secagg.json").read_text())
    found, graphs = stored["rows"], stored["comparison"]
    sparse, complete = (f"{graphs[name][-1]['total_seconds']:.1f} s" for name in ("sparse", "complete"))
    text = " ".join((ROOT / "docs/privacy.md").read_text(encoding="utf-8").split())
    assert f"a round takes {sparse} on the sparse graph and {complete} on the complete one" in text
    table = rows(ROOT / "docs/privacy.md", after="### What it costs")
    assert table == [
        [
            str(row["clients"]),
            f"{row['parameters']:,}",
            str(row["neighbours"]),
            f"{row['client_seconds']:.3f}",
            f"{row['server_seconds']:.2f}",
            f"{row['up_over_plain']:.4f}",
        ]
        for row in found
    ]


def test_figures_of_the_page_on_adapters_are_the_stored_ones():
    stored = {name: json.loads((ROOT / f"benchmarks/results/adapters/{name}.json").read_text())
              for name in ("memory", "orthogonality")}  # fmt: skip
    page, found = ROOT / "docs/adapters.md", stored["orthogonality"]["rows"]
    for partition, method, clients, *cells in rows(page, after="### One basis, or one for each client"):
        (row,) = (
            row
            for row in found
            if (row["partition"], row["method"], row["clients"])
            == (partition.replace("–", "iid"), method.strip("`"), int(clients))
        )
        figures = [[100 * score(row[key]) for score in (mean, pstdev)] for key in ("overlap", "moved", "acc", "fgt")]
        assert cells == [f"{middle:.1f} ± {spread:.1f}" for middle, spread in figures]
    cases = stored["memory"]["cases"].values()
    for (_, peak, seconds, upload), case in zip(rows(page, after="A BERT of 22 million"), cases, strict=True):
        assert peak == f"{case['peak_bytes'] / 1e9:.1f} GB" and seconds == f"{case['seconds_round']:.0f}"
        assert float(upload.removesuffix(" MB")) == pytest.approx(case["upload_bytes"] / 1e6, abs=0.05)


def test_bytes_of_the_fot_page_follow_from_the_formulas():
    """Sketches of 5 d columns, or the upper triangle of a Gram matrix; two float64 energies a layer."""
    widths = [64 + 1, 128 + 1, 128 + 1]
    gaussian = sum(4 * d * 5 * d + 16 for d in widths)
    gram = sum(4 * d * (d + 1) // 2 + 16 for d in widths)
    model = 4 * (65 * 128 + 129 * 128 + 129 * 10)
    text = (ROOT / "docs/fot.md").read_text(encoding="utf-8")
    for number in (gaussian, gram, model):
        assert f"{number:,}" in text
    # 20 clients after four of the five tasks; 10 clients in 100 rounds of training
    rounded = [f"{total / 1e6:.1f} MB" for total in (80 * gaussian, 80 * gram, 1000 * model)]
    assert all(number in text for number in rounded)


def test_command_page_names_the_fields_of_the_files(tmp_path):
    private = ("dp.noise_multiplier=1", "agg.weights=uniform", "sampling=poisson")
    nodes = ("engine=flower", "flower.address=in-process")
    config = resolve(
        "permuted-digits",
        method="fot",
        overrides=["tasks=2", "rounds=2", "eval_local=1", "eval_later=true", "validation=0.1", *private, *nodes],
    )

    class Counts(cfl.Callback):
        def on_round(self, view):
            return {"rounds": len(view.rows)}

        on_end = on_round

        def stop(self, rows):
            return "phase"

    cfl.run(config, output=tmp_path, callbacks=[Counts()])
    page = ROOT / "docs/command-line.md"
    for title, found in (
        ("### metrics.json", json.loads((tmp_path / "metrics.json").read_text())),
        ("### rounds.jsonl", json.loads((tmp_path / "rounds.jsonl").read_text().splitlines()[0])),
    ):
        named = [name.strip("`") for cells in rows(page, after=title) for name in cells[0].split(", ")]
        assert sorted(named) == sorted(found)
    files = {cells[0].strip("`").rstrip("/") for cells in rows(page, after="## Files of a run")}
    # by the command alone; of failed runs; of methods that make images; of runs that went on
    more = {"accuracy.png", "error.json", "images", "metrics-2-tasks.json"}
    assert files == {path.name for path in tmp_path.iterdir()} | more


def test_figures_of_the_speed_page_are_the_stored_ones():
    page, folder = ROOT / "docs/speed.md", ROOT / "benchmarks/results/throughput"
    files = {path.stem: json.loads(path.read_text()).get("workloads") for path in folder.glob("*.json")}
    float32 = {row["workload"]: row for name in files if name.startswith("float32") for row in files[name]}
    bf16 = {row["workload"]: row for name in ("bf16-amx", "bf16-amx-convolutions") for row in files[name]}
    table = rows(page, after="python benchmarks/throughput.py --workload resnet-round --precision bf16")
    assert {cells[0] for cells in table} == {f"`{name}`" for name in float32} and len(table) == len(float32)

    def ratio(row, other):
        found = [row[f"ratio_vs_{name}"] for name in (other, f"pool_{other}") if f"ratio_vs_{name}" in row]
        return f"{min(found):.2f}" if found else "–"  # of two settings in float32 the faster one

    for name, engine, steps, share, *ratios in table:
        row, lower = float32[name.strip("`")], bf16.get(name.strip("`"), {})
        block = f", block {row['block']}, compiled" if row["block"] and row["compile"] else ""
        assert engine == f"`{row['engine']}`{block}"
        assert (steps, share) == (f"{row['steps_per_second']:.0f}", f"{row['share_of_peak']:.0%}".replace("%", " %"))
        assert ratios == [
            *(ratio(row, other) for other in ("plain", "pfl_2", "jax")),
            *(ratio(lower, other) for other in ("float32", "plain")),
        ]
    text, rounded = " ".join(page.read_text().split()), [ratio(row, "plain_bf16") for row in bf16.values()]
    assert "takes {}, {} and {} times as long as `cfl` with `precision=bf16`".format(*rounded) in text
    jax = [ratio(float32[name], "jax") for name in ("permuted-digits", "pmnist-round")]
    assert "takes {} of our time on the small network and {} on the larger one".format(*jax) in text
    amx, amd, without = (
        {row["workload"]: ratio(row, "float32") for row in found}
        for found in (bf16.values(), files["bf16-amd"], files["bf16-intel"])
    )
    columns = "pmnist-round", "cifar100-round", "resnet-round"
    told = [cells[1:] for cells in rows(page, after="Seconds of a round of FedAvg in float32")]
    assert told == [[found.get(name, "–") for name in columns] for found in (amx, amd, without)]
    pool = [ratio(row, "float32") for row in files["bf16-amx-pool"]]
    assert "the ratios of `cifar100-round` and `resnet-round` are {} and {}.".format(*pool) in text


def test_figures_of_sketches_on_the_page_of_details_are_the_stored_ones():
    page = ROOT / "docs/speed-details.md"
    sketches = json.loads((ROOT / "benchmarks/results/gpse/gpse.json").read_text())
    ratios = {f"{row['ratio']:.2f}" for row in sketches["client"]}
    assert all(ratio in ratios for *_, ratio in rows(page, after="A client's sketches"))
    drawn, text = sorted(row["ratio"] for row in sketches["layers"]), " ".join(page.read_text().split())
    assert f"is {drawn[0]:.1f} to {drawn[-1]:.0f} times as fast as drawing G" in text
    assert f"({sum(ratio < 5 for ratio in drawn)} of {len(drawn)} layers)" in text
    first, second, _, last = (f"{median(row['mebibytes']):.0f}" for row in sketches["memory"])
    assert f"adds {first} MiB to a client's peak with 100 samples, {second} with 1,600 and {last} with 6,400" in text


def test_figures_of_flower_on_the_speed_page_are_the_stored_ones():
    page, results = ROOT / "docs/speed-details.md", ROOT / "benchmarks/results"
    found = json.loads((results / "throughput/flower.json").read_text())
    (row,) = found["workloads"]
    ratios = [f"{row[f'ratio_vs_{name}']:.2f}" for name in ("flower", "pool_vmapped")]
    seconds = f"{median(row['seconds']['ours']):.2f}"
    assert rows(page, after="python benchmarks/throughput.py --workload") == [
        [f"`{row['workload']}`", seconds, *ratios]
    ]
    found = json.loads((results / "deployment/deployment.json").read_text())
    expected = []
    for row in found["rows"]:
        spent = [f"{row[name]:.2f}" for name in ("seconds_of_answers", "seconds_alone")]
        expected.append([f"`{row['secagg']}`", str(row["messages"]), f"{row['seconds']:.1f}", *spent])
    assert rows(page, after="python benchmarks/deployment.py") == expected


def test_how_often_auto_chooses_well_is_as_stored():
    stored = [ROOT / f"benchmarks/results/throughput/auto{name}.json" for name in ("", "-cifar100", "-resnet")]
    found = [row for path in stored for row in json.loads(path.read_text())["workloads"]]
    told = [(row["workload"], f"in {row['good']} of {len(row['ratios'])}") for row in found]
    worse = [ratio for row in found for ratio in row["ratios"] if ratio > 1.05]
    text = " ".join((ROOT / "docs/speed.md").read_text().split())
    for name, often in told:
        assert re.search(rf"{often}[^,.]*`{name}`", text)
    assert f"The other choices take {min(worse):.2f} to {max(worse):.2f} times as long" in text


def test_the_growth_on_the_speed_page_is_the_stored_one():
    found = json.loads((ROOT / "benchmarks/results/scaling/scaling.json").read_text())
    page, stored, given = ROOT / "docs/speed-details.md", found["population"], ("--engine pool+vmapped", "--rounds 3")
    assert f"`python benchmarks/scaling.py {' '.join(given)}`" in page.read_text()  # the rest is the default
    assert all(option in found["command"] for option in given)
    expected = [
        [f"{row['clients']:,}", f"{median(row['seconds']):.3f}", f"{row['peak_bytes'] / 1e6:.0f}"] for row in stored
    ]
    assert rows(page, after="## How it grows") == expected
    assert all(row["cohort"] == 64 for row in stored)
    assert {f"{row['imported_bytes'] / 1e6:.0f}" for row in stored} == {"250"}


def test_figures_of_the_checkpoints_are_the_stored_ones():
    found, page = (
        json.loads((ROOT / "benchmarks/results/checkpoints/checkpoints.json").read_text()),
        "docs/speed-details.md",
    )
    assert f"{found['command']}\n" in (ROOT / page).read_text(encoding="utf-8")
    expected = []
    for row in found["rows"]:
        for mode, what in (("changed", "of what changed"), ("all", "of everything")):
            own = row["modes"][mode]
            written, seconds = f"{own['checkpoint_bytes'] / 1e6:,.1f}", f"{own['checkpoint_seconds']:.3f}"
            factor = f"{own['round_seconds'] / row['modes']['none']['round_seconds']:.1f}"
            expected.append([row["method"], str(row["cohort"]), what, written, seconds, factor])
    assert rows(ROOT / page, after="### Checkpoints") == expected


def test_figures_of_the_fidelity_page_are_the_stored_ones():
    def shown(value, form):
        if isinstance(value, list):
            return f"{shown(mean(value), form)} ± {shown(pstdev(value), form)}"
        if value is None or isinstance(value, str):
            return value or "–"
        return f"{100 * value:{form[1:]}}" if form.startswith("%") else f"{value:{form}}"

    page = ROOT / "docs/fidelity.md"
    files = sorted((ROOT / "benchmarks/results/fidelity").glob("*.json"))
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in files}
    tables = [table for stored in found.values() for table in stored["tables"]]
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"^python benchmarks/fidelity.py --parts (\w+)$", text, re.MULTILINE) == [
        name for title in re.findall(r"^### (.+)$", text, re.MULTILINE)
        for name, stored in found.items() if stored["tables"][0]["title"] == title
    ]  # fmt: skip
    titles = [
        *(table["title"] for table in tables),
        "Halves of the layers on Permuted MNIST",
    ]  # the last: of whole runs
    assert sorted(re.findall(r"^### (.+)$", text, re.MULTILINE)) == sorted(titles)
    for table in tables:
        title, columns = table["title"], table["columns"]
        expected = [[shown(*pair) for pair in zip(row, columns.values(), strict=True)] for row in table["rows"]]
        assert f"| {' | '.join(columns)} |\n" in text.partition(f"\n### {title}\n")[2]
        assert rows(page, after=f"### {title}\n") == expected


def test_rank_rules_at_full_length_are_the_stored_runs():
    """The rows after the paper's: the runs of FOT on Permuted MNIST, seed 0."""
    page, page_text = ROOT / "docs/fidelity.md", " ".join((ROOT / "docs/fidelity.md").read_text().split())
    found = defaultdict(dict)
    for folder in (RUNS / "paper/permuted-mnist").iterdir():
        config, metrics = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        own = config["strategy"]
        halves = {own.get(half, "fot") for half in ("first_half", "second_half")} | {own.get("freeze_first", False)}
        kind = (config["method"], config["seed"], config["partition"]["task_share"], config["dp"]["level"], halves)
        if kind == ("fot", 0, 1.0, "none", {"fot", False}):
            use = metrics["subspace_use"]
            name = f"{own['criterion']}, dropout {'on' if own.get('dropout') else 'off'}, {own['model']} model"
            name += (
                "s" * (own["model"] == "local")
                + ", Gram matrices" * (own["sketch"] == "gram")
                + ", bfloat16" * (config.get("precision") == "bf16")
            )
            shares = metrics["acc"], metrics["fgt"], metrics["accuracy_matrix"][9][9], mean(use.values()), use["1"]
            found[config["partition"]["name"]][name] = [f"{100 * share:.2f}" for share in shares]
    printed, gaps = read_yaml(ROOT / "cfl/experiments/papers/fot.yaml"), []
    widest = "norm_ratio, dropout off, global model, Gram matrices, bfloat16"
    tables = (
        ("IID", "iid", "With IID data and threshold"),
        ("non-IID", "shards", "A larger basis can cost accuracy on later tasks."),
    )
    for place, (part, partition, above) in enumerate(tables):
        paper, *ours = rows(page, after=above)
        assert {name: cells for name, *cells in ours} == found[partition]
        scores = re.findall(r"([\d.]+)±", printed["fot-table1"]["paper"][part]["FOT"][0])
        assert paper == ["paper", *scores, "–", printed["fot-table3"]["paper"][""]["PMNIST"][place], "–"]
        gaps.append((found[partition][widest][3], paper[4], float(paper[1]) - float(found[partition][widest][0])))
        plain = [cells for name, *cells in ours if name.startswith("energy, dropout off")]
        assert all(float(cells[3]) < 2 / 3 * float(paper[4]) for cells in plain)
    (use, theirs, lower), shards = gaps
    told = (
        f"({shards[0]} for {shards[1]}, and with IID data {use} for {theirs}), but its ACC is {shards[2]:.1f} points "
    )
    assert told + f"lower, and {lower:.1f} with IID data" in page_text
    models = "global model", "local models"
    here, local = (found["shards"][f"energy, dropout off, {what}, bfloat16"] for what in models)
    gains = float(local[0]) - float(here[0]), float(here[1]) - float(local[1])
    assert "an ACC larger by {:.1f} points and an FGT smaller by {:.1f}, with one seed".format(*gains) in page_text


def test_cohorts_by_round_are_no_better_for_fedavg():
    found = {}
    for folder in (RUNS / "paper/permuted-mnist").glob("fedavg-seed0-*"):
        config, metrics = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        if (config.get("precision"), config["partition"]["name"]) == ("bf16", "shards") and config["rounds"] != 200:
            found[config["sampling"]] = [f"{100 * metrics[score]:.2f}" for score in ("acc", "fgt")]
    told = "has an ACC of {} and an FGT of {}, and with `sampling=round`, the code's cohorts, {} and {}."
    assert told.format(*found["fixed"], *found["round"]) in " ".join((ROOT / "docs/fidelity.md").read_text().split())


def test_differences_from_the_paper_have_the_intervals_of_the_page():
    """Welch's interval in closed form, from the standard deviations of three seeds each."""
    table, found = reproduce.table("fot-table1"), []
    for part, (row, method) in itertools.product(("IID", "non-IID"), (("FL", "FedAvg"), ("FOT", "FOT"))):
        [(cell, runs)] = table.runs([row, "PMNIST", part], range(3), "paper", [], Path("runs"), [RUNS]).items()
        for measure, ours in reproduce.scores(table.measures, runs).items():
            paper = cell.paper[measure]
            assert ours.runs == 3
            squares = [own.std**2 / 2 for own in (ours, paper)]  # of the means; / 2 as the deviations divide by 3
            freedom = sum(squares) ** 2 / sum(square**2 / 2 for square in squares)
            gap, half = ours.mean - paper.mean, stats.t.ppf(0.975, freedom) * math.sqrt(sum(squares))
            found.append([part, method, measure.upper(), *(f"{each:+.2f}" for each in (gap, gap - half, gap + half))])
    assert rows(ROOT / "docs/fidelity.md", after="### Permuted MNIST beside the paper") == found


def test_readme_has_permuted_mnist_beside_the_paper():
    """As benchmarks/RESULTS.md, which a test compares with the stored runs."""
    methods = {"FL": "FedAvg", **{f"{name}+FL": name for name in ("EWC", "RGO", "ER", "GPM")}}
    methods |= {name: name for name in ("GLFC", "TARGET", "FOT")}
    expected = []
    for partition in ("IID", "non-IID"):
        own = rows(ROOT / "benchmarks/RESULTS.md", after=f"**FOT, Table 1: PMNIST, {partition}**")
        for name, acc_paper, acc, _, fgt_paper, fgt, _, runs in own:
            if name in methods and runs != "–":
                expected.append([partition, methods[name], acc, acc_paper, fgt, fgt_paper, runs])
    assert rows(ROOT / "README.md", after="Permuted MNIST at the paper's length") == expected


def test_baselines_at_full_length_are_the_stored_runs():
    """ER, GPM, GLFC and FOT, on shards, seed 0; and the paper's means of the same cells."""
    table = reproduce.table("fot-table1")
    found, page = [], ROOT / "docs/fidelity.md"
    one = ["strategy.budget=total"]
    for row, given in (("ER+FL", []), ("ER+FL", one), ("GPM+FL", []), ("GLFC", []), ("GLFC", one), ("FOT", [])):
        place = [row, "PMNIST", "non-IID"]
        runs = table.runs(place, [0], "paper", given, Path("runs"), [RUNS])
        [(cell, (run,))] = runs.items()
        ours = run.results()
        scores = [100 * ours["acc"], 100 * ours["fgt"], *(score.mean for score in cell.paper.values())]
        name = ", ".join([row.removesuffix("+FL"), *(f"`{option}`" for option in given)])
        found.append([name, *(f"{score:.2f}" for score in scores)])
        if given:  # README: at most two points higher
            assert scores[0] - scores[2] <= 2
        if row == "ER+FL" and given:  # the page: within one and a half of the paper's deviations
            assert all(abs(100 * ours[own] - score.mean) < 1.5 * score.std for own, score in cell.paper.items())
    assert rows(page, after="Our ER, GPM and GLFC are stronger than the paper's.") == found
    text = " ".join(page.read_text(encoding="utf-8").split())
    [(cell, (run,))] = table.runs(["ER+FL", "PMNIST", "IID"], [0], "paper", one, Path("runs"), [RUNS]).items()
    acc, fgt = (f"{100 * run.results()[name]:.2f}" for name in ("acc", "fgt"))
    printed = " and ".join(f"{score.mean:.2f}" for score in cell.paper.values())
    assert f"with IID data it has an ACC of {acc} and an FGT of {fgt} (paper: {printed})" in text
    *_, glfc, less, _ = (float(acc) - float(theirs) for _, acc, _, theirs, _ in found)
    assert f"GLFC's ACC is {less:.1f} points higher than the paper's in place of {glfc:.1f}" in text
    for partition in ("IID", "non-IID"):  # RGO comes within a point of the paper's ACC
        [(cell, (run,))] = table.runs(["RGO+FL", "PMNIST", partition], [0], "paper", [], Path("runs"), [RUNS]).items()
        assert abs(100 * run.results()["acc"] - cell.paper["acc"].mean) < 1


def test_figures_of_the_page_on_hostile_clients_are_the_stored_ones():
    page, stored = ROOT / "docs/robustness.md", ROOT / "benchmarks/results/robust/permuted-digits.json"
    made = json.loads(stored.read_text())
    assert f"python benchmarks/robust.py {made['command'].partition('robust.py ')[2]}" in page.read_text()
    runs = {(row["method"], row["rule"], row["attack"], row["hostile"]): row for row in made["rows"]}
    for rule, hostile, *cells in rows(page, after="### FOT with poisoned sketches"):
        name = "" if rule == "mean" else rule.strip("`")
        row = runs["fot", name, "sketch" if hostile != "0" else "none", int(hostile)]
        figures = [mean(own["1"] for own in row["protected"]), *map(mean, zip(*row["learned"])), mean(row["acc"])]
        assert cells == [f"{100 * figure:.1f}" for figure in figures]
    for method, rule, *cells in rows(page, after="### Updates of four hostile clients"):
        name = "" if rule == "mean" else rule.strip("`")
        attacks = [("none", 0), *((attack, 4) for attack in ("sign_flip", "scale", "label_flip", "alie", "ipm"))]
        found = [mean(runs[method.strip("`"), name, attack, count]["acc"]) for attack, count in attacks]
        assert cells == [f"{100 * acc:.1f}" for acc in found]
    between = [100 * stdev(row["acc"]) for row in made["rows"] if row["attack"] != "sketch"]
    text = f"deviation of {mean(between):.1f} percentage points (mean over the table; {max(between):.1f} at most)"
    assert text in " ".join(page.read_text().split())


def test_figures_of_the_page_on_reliability_are_the_stored_ones():
    folder, kinds = (
        ROOT / "benchmarks/results/reliability",
        ("kill before", "kill after", "torn write", "full disk", "flush fails"),
    )
    stored = [json.loads(path.read_text()) for path in sorted(folder.glob("soak-*.json"))]
    assert all(one["failures"] == [] and one["command"].startswith("python benchmarks/soak.py ") for one in stored)
    kills = [one["kills"] for one in stored if "kills" in one]
    workers, faults, folders, memory = (
        next(one[part] for one in stored if part in one) for part in ("workers", "faults", "folder", "memory")
    )
    told = {part.strip("`"): [float(number.replace(",", "")) for number in re.findall(r"\b\d[\d,.]*\b", text)]
            for part, text, _ in rows(ROOT / "docs/reliability.md", after="What we found")}  # fmt: skip
    assert told["kills"] == [
        sum(one["all"] for one in kills), sum(sum(one["runs"].values()) for one in kills),
        sum(one.get("clock_set_back", 0) for one in kills),
    ]  # fmt: skip
    parts = [faults[name] for name in ("loop", "pool", "compare")]
    assert told["faults"] == [sum(part[kind] for part in parts for kind in kinds), *(part["writes"] for part in parts)]
    assert told["workers"] == [workers["killed"], round(workers["took_seconds"] / 60), workers["rounds"]]
    assert told["folder"] == [folders["comparisons"], folders["reports"]]
    early, late = memory["seen"][1], memory["seen"][-1]
    assert told["memory"] == [memory["rounds"], early["mib"], early["files"], late["mib"], late["files"]]


def test_figures_of_reviews_on_the_page_of_texts_are_the_stored_ones():
    runs = {}
    for folder in (RUNS / "paper/fedproj-reviews").iterdir():
        config, found = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        if config["model"].get("weights") is None:
            runs.setdefault((*config["regularizers"], config["partition"]["alpha"]), []).append(found)
    for name, *cells in rows(ROOT / "docs/text.md", after="from FedAvg over the same seeds"):
        for alpha, score, difference in zip((0.3, 0.5), cells[::2], cells[1::2]):
            own, plain = runs[(*({name.strip("`")} - {"fedavg"}), alpha)], runs[(alpha,)]
            accs = [100 * run["acc"] for run in own]
            assert len(accs) == 5 and score == f"{mean(accs):.1f} ± {pstdev(accs):.1f}"
            gap = {key: 100 * value for key, value in differences(own, plain)["acc"].items()}
            told = "{mean:+.1f} [{low:+.1f}, {high:+.1f}]".format(**gap)
            assert difference == ("–" if name == "`fedavg`" else told)


def test_figures_of_a_pretrained_network_on_the_page_of_texts_are_the_stored_ones():
    accs = {}
    for folder in (RUNS / "paper/fedproj-reviews").iterdir():
        config, found = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        if config["model"].get("weights") is not None:
            assert (config["public"]["samples"], config["seed"]) == (500, 0)
            name = config["regularizers"][0] if config["regularizers"] else "fedavg"
            accs[name, config["partition"]["alpha"]] = f"{100 * found['acc']:.1f}"
    table = rows(ROOT / "docs/text.md", after="MiniLM, a pretrained network")
    assert {(name.strip("`"), alpha): told for name, *cells in table for alpha, told in zip((0.3, 0.5), cells)} == accs


def test_figures_of_fedcil_are_the_stored_runs():
    small, full = {}, {}
    for runs, folder in ((small, RUNS / "small/permuted-mnist"), (full, RUNS / "paper/permuted-digits")):
        for run in folder.glob("fedcil-*"):
            config, metrics = read_yaml(run / "config.yaml"), json.loads((run / "metrics.json").read_text())
            scores = [f"{100 * metrics[name]:.1f}" for name in ("acc", "fgt")]
            runs[config["partition"]["name"], config["strategy"]["consolidation"]] = scores
    (iid, shards), (without, given) = (small[name, 5] for name in ("iid", "shards")), (full["iid", n] for n in (0, 20))
    assert len(small) == len(full) == 2
    baselines = json.loads((ROOT / "benchmarks/results/baselines/permuted-digits-iid.json").read_text())
    text = " ".join((ROOT / "docs/methods.md").read_text(encoding="utf-8").split())
    assert f"ACC {iid[0]} and FGT {iid[1]} with IID data (shards: {shards[0]} and {shards[1]})" in text
    commands = [f"(`strategy.consolidation={steps}`)" for steps in (20, 0)]
    assert (
        f"ACC of {given[0]} with 20 such steps a round {commands[0]} and of {without[0]} without {commands[1]}" in text
    )
    assert f"[FedAvg has {100 * baselines['methods']['fedavg']['acc']['mean']:.1f}]" in text


def test_halves_of_the_layers_on_the_fidelity_page_are_the_stored_runs():
    stored = [path for path in (RUNS / "paper/permuted-mnist").iterdir() if path.name.startswith("fot")]
    table = reproduce.table("fot-table14")
    found, printed = {}, {cell.row: cell.paper for cell in table.cells if cell.column == "Mini-ImageNet"}
    for cell, runs in table.runs(["PMNIST"], range(3), "paper", [], ROOT / "none", stored).items():
        scores = reproduce.scores(table.measures, runs)
        found[cell.row] = [f"{scores[name].mean:.1f}" for name in ("acc", "fgt")]
        found[cell.row] += [f"{printed[cell.row][name].mean:.2f}" for name in ("acc", "fgt")]
    told = rows(ROOT / "docs/fidelity.md", after="### Halves of the layers on Permuted MNIST")
    assert {f"{first} - {second}": scores for first, second, *scores in told} == found
    acc, fgt = ({row: Decimal(scores[place]) for row, scores in found.items()} for place in (0, 1))
    text = " ".join((ROOT / "docs/fidelity.md").read_text(encoding="utf-8").split())
    assert f"freezing it costs {acc['FOT - FOT'] - acc['FOT - frozen']} points" in text
    gain, more = (score["FOT - finetune"] - score["FOT - FOT"] for score in (acc, fgt))
    assert f"Fine-tuning it gains {gain} points and forgets {more} points more" in text
    iid, shards = (told_of("fot-table6", "FRZ", [0], column) for column in ("IID", "non-IID"))
    frozen = f"an ACC of {iid[0]} and an FGT of {iid[1]} with IID data, and of {shards[0]} and {shards[1]} with non-IID"
    iid, shards = (told_of("fot-table1", "FOT", range(3), column) for column in ("IID", "non-IID"))
    assert f"{frozen} data. FOT has {iid[0]} and {iid[1]}, and {shards[0]} and {shards[1]}." in text


def told_of(table, row, seeds, column):
    """ACC and FGT, as on a page, of a row's stored runs on Permuted MNIST at full length."""
    stored = [path for path in (RUNS / "paper/permuted-mnist").iterdir() if path.name.startswith("fot")]
    (runs,) = reproduce.table(table).runs(["PMNIST", row, column], seeds, "paper", [], ROOT / "none", stored).values()
    scores = reproduce.scores(["acc", "fgt"], runs)
    return [f"{scores[name].mean:.1f}" for name in ("acc", "fgt")]


def test_noise_on_permuted_mnist_hides_all_directions_as_the_fidelity_page_says():
    for folder in (RUNS / "paper/permuted-mnist").glob("fot-*"):
        if read_yaml(folder / "config.yaml")["dp"]["level"] != "none":
            metrics = json.loads((folder / "metrics.json").read_text())
            assert set(metrics["subspace_use"].values()) == {0.0} and 4.99 < metrics["epsilon"] <= 5
    text = " ".join((ROOT / "docs/fidelity.md").read_text(encoding="utf-8").split())
    iid, shards = (told_of("fot-table6", "DP", [0], column) for column in ("IID", "non-IID"))
    assert f"ACC is {iid[0]} and FGT {iid[1]} with IID data, and {shards[0]} and {shards[1]} with non-IID data." in text
    iid, shards = (told_of("fot-table1", "FOT", range(3), column) for column in ("IID", "non-IID"))
    assert f"Without noise FOT has {iid[0]} and {iid[1]}, and {shards[0]} and {shards[1]}." in text


def test_accuracies_of_fedsols_table_on_the_fidelity_page_are_the_stored_runs():
    found = {}
    for folder in (RUNS / "paper/mnist").iterdir():
        config, metrics = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        (name,) = config["regularizers"] or ["fedavg"]
        three = config["model"]["options"].get("repeat_grey", False)
        own = {"fedprox": "mu", "fedsam": "rho"}.get(name)
        value = f", {own} {config['regularizer'][name][own]:g}" if own else ""
        found[name + value, three] = f"{100 * metrics['acc']:.1f}"
    told = rows(ROOT / "docs/fidelity.md", after="Of Table 2,")
    shown = {(name.lower(), three): score for name, _, *ours in told for three, score in zip((True, False), ours)}
    assert {key: score for key, score in shown.items() if score != "–"} == found
    printed = read_yaml(ROOT / "cfl/experiments/papers/fedsol.yaml")["fedsol-table2"]["paper"]["LDA"]
    paper = {name.lower(): float(cells[0].partition("±")[0]) for name, cells in printed.items()}
    names = {"fedprox": "fedprox, mu 0.01", "fedsam": "fedsam, rho 0.1"}
    above = {name: float(found[names.get(name, name), True]) - score for name, score in paper.items()}
    near = ("fedavg", "fedprox", "fedntd", "fedsam", "fedasam", "fedsol")
    assert {*above} == {*near, "scaffold", "fednova"} and max(abs(above[name]) for name in near) < 0.5
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert "FedAvg, FedProx (mu 0.01), FedNTD, FedSAM (rho 0.1), FedASAM and FedSOL are within 0.5 points" in readme
    told = f"SCAFFOLD is {above['scaffold']:.1f} points above the paper's, and our FedNova {above['fednova']:.1f}"
    assert told in readme


def test_bases_of_a_cohort_alone_on_the_fidelity_page_are_the_stored_runs():
    found = {}
    for folder in (RUNS / "paper/permuted-mnist").glob("gpm-*"):
        config, metrics = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        if config["seed"] != 0:
            continue
        who = config["strategy"].get("participants", "all")
        assert config.get("precision", "float32") == ("bf16" if who == "sampled" else "float32")
        found[config["partition"]["name"], who] = [100 * metrics[name] for name in ("acc", "fgt")]
    page = ROOT / "docs/fidelity.md"
    told = {
        (partition, who): scores for partition, who, *scores in rows(page, after="With IID data, ACC stays the same")
    }
    assert {key: scores[:2] for key, scores in told.items()} == {
        key: [f"{score:.2f}" for score in scores] for key, scores in found.items()
    }
    (every, _), (sampled, _) = found["shards", "all"], found["shards", "sampled"]
    paper = float(told["shards", "all"][2])
    text = f"lowers our ACC by {every - sampled:.1f} points. Our ACC is {every - paper:.1f} points above the paper's"
    assert text in " ".join(page.read_text().split())


def test_figures_of_whole_runs_and_of_dropout_on_the_speed_pages_are_the_stored_ones():
    folder = ROOT / "benchmarks/results/throughput"
    found = json.loads((folder / "whole-run.json").read_text())
    shares = {run["benchmark"]: f"{run['beside_training']:.1%}".replace("%", " %") for run in found["runs"]}
    text = " ".join((ROOT / "docs/speed.md").read_text().split())
    told = (
        "takes {} of these seconds for FOT on `split-cifar100 --scale small`, and {} on `permuted-mnist --scale small`"
    )
    assert told.format(shares["split-cifar100"], shares["permuted-mnist"]) in text
    (row,) = json.loads((folder / "dropout-amx.json").read_text())["workloads"]
    told = "in float32 take {:.2f} times as long as those in bfloat16, and the plain loop {:.2f} times as long"
    text = " ".join((ROOT / "docs/speed-details.md").read_text().split())
    assert told.format(row["ratio_vs_float32"], row["ratio_vs_plain"]) in text


def test_full_runs_in_bfloat16_on_the_fidelity_page_are_the_stored_ones():
    found, accuracies = {}, {}
    for folder in (RUNS / "paper/permuted-mnist").iterdir():
        config, metrics = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        name, options, precision = config["method"], config["strategy"], config.get("precision", "float32")
        preset = [options.get(key) for key in ("criterion", "model", "sketch")] == ["energy", "global", "gaussian"]
        as_in_paper = preset if name == "fot" else name == "fedavg" and config["rounds"] != 200
        as_in_paper &= config["partition"]["task_share"] == 1.0  # Table 1, not Table 10
        place = config["partition"]["name"], config["sampling"], config["seed"]
        if as_in_paper and place == ("shards", "fixed", 0):
            found[name, precision] = [f"{100 * metrics[key]:.2f}" for key in ("acc", "fgt")]
            accuracies[name, precision] = np.array(metrics["accuracy_matrix"], float)
    page, names = ROOT / "docs/fidelity.md", {"FedAvg": "fedavg", "FOT": "fot"}
    table = rows(page, after="Permuted MNIST at full length, not IID, seed 0 (`benchmarks/RESULTS.md`")
    assert {(names[name], precision.strip("`")): scores for name, precision, *scores in table} == found
    gaps = (np.nanmax(abs(accuracies[name, "bf16"] - accuracies[name, "float32"])) for name in ("fedavg", "fot"))
    text = "differs by more than {:.2f} points with FedAvg, and by more than {:.2f} with FOT."
    assert text.format(*(100 * gap for gap in gaps)) in " ".join(page.read_text().split())


def test_figures_of_forward_passes_on_the_speed_page_are_the_stored_ones():
    models = json.loads((ROOT / "benchmarks/results/passes/passes.json").read_text())["models"]
    ratios = {name: own["ratios"]["128"] for name, own in models.items()}
    mlp, text = ratios.pop("mlp"), " ".join((ROOT / "docs/speed.md").read_text().split())
    low, high = min(ratios.values()), max(ratios.values())
    assert f"transformers take {low:.2f} to {high:.2f} times as long, and an MLP {mlp:.2f} times" in text


def test_figures_of_a_vision_transformer_on_the_page_of_adapters_are_the_stored_ones():
    found, page = {}, ROOT / "docs/adapters.md"
    for folder in (RUNS / "small/split-cifar100").iterdir():
        config = read_yaml(folder / "config.yaml")
        if config["model"]["name"] == "vit_small":
            spent = json.loads((folder / "timing.json").read_text())
            seconds = sum(spent["clients"].values()) + sum(spent["server"].values())
            metrics = json.loads((folder / "metrics.json").read_text())
            found.setdefault(config["method"], []).append({**metrics, "seconds": seconds})
    text = " ".join(page.read_text().split())
    (lorm,) = (run["accuracy_matrix"] for run in found["lorm"] if run["seed"] == 0)
    first, *later = (100 * row[task] for task, row in enumerate(lorm))
    learned = f"the first task to {first:.0f} %, and the others to {min(later):.0f} to {max(later):.0f} % (seed 0)"
    assert learned in text
    for name, *cells in rows(page, after="## Five tasks of Split CIFAR-100"):
        runs = found.pop(name.strip("`"))
        scores = [[100 * run[key] for run in runs] for key in ("acc", "fgt")]
        assert {run["seed"] for run in runs} == {0, 1, 2}
        sent = [mean(run[key] for run in runs) for key in ("bytes_up", "bytes_down")]
        assert cells == [
            *(f"{mean(own):z.1f} ± {pstdev(own):.1f}" for own in scores),
            *(f"{bytes / 1e6:.1f}" for bytes in sent),
            f"{mean(run['seconds'] for run in runs if run['seed'] < 2):.0f}",
        ]
    assert not found
    (before,) = (RUNS / "paper/cifar10").iterdir()
    acc = json.loads((before / "metrics.json").read_text())["acc"]
    assert f"to an accuracy of {100 * acc:.1f} %" in text


def test_figures_of_topics_on_the_page_of_texts_are_the_stored_ones():
    runs = {}
    for folder in (RUNS / "small/split-topics").iterdir():
        config, found = read_yaml(folder / "config.yaml"), json.loads((folder / "metrics.json").read_text())
        runs.setdefault((config["method"], config["model"]["adapter"]), []).append(found)
    table = rows(
        ROOT / "docs/text.md", after="cfl-run compare split-topics --scale small --methods fedavg,fot,gpm,olora"
    )
    told = {}
    for name, *cells in table:
        for adapter, pair in (("none", cells[:2]), ("lora", cells[2:])):
            if pair != ["–", "–"]:
                told[name.strip("`"), adapter] = pair
    assert told == {key: _scores(own) for key, own in runs.items()}
    sent = {key: mean(run["bytes_up"] for run in own) / 1e6 for key, own in runs.items()}
    text = f"({sent['fedavg', 'lora']:.1f} instead of {sent['fedavg', 'none']:.1f} MB up with FedAvg)"
    assert text in (ROOT / "docs/text.md").read_text()


@pytest.mark.parametrize("scenario", ["class", "task"])
def test_tables_of_the_class_incremental_page_are_the_stored_runs(scenario):
    groups, times = defaultdict(list), defaultdict(list)
    for run in (RUNS / "small/split-fashion-mnist").iterdir():
        config, own = read_yaml(run / "config.yaml"), json.loads((run / "metrics.json").read_text())
        if config["scenario"] != scenario:
            continue
        share = config["method"] == "fedprotip" and config["strategy"]["score"] == "share"
        also = ", score=share" if share else ", infer_tasks" if config["strategy"].get("infer_tasks") else ""
        name = f"`{config['method']}`{also}"
        groups[name, config["partition"]["name"]].append(own)
        timing = json.loads((run / "timing.json").read_text())
        times[name].append(sum(sum(timing[who].values()) for who in ("clients", "server")))

    def percent(runs, name):
        """Mean and deviation over three seeds; a dash for a score that the runs do not have."""
        values = [100 * run[name] for run in runs if run.get(name) is not None]
        assert len(values) in (0, 3)
        return f"{np.mean(values):z.1f} ± {np.std(values):.1f}" if values else "–"

    def row(name):
        iid, lda = groups[name, "iid"], groups[name, "lda"]
        scores = [percent(runs, score) for runs in (iid, lda) for score in ("acc", "fgt")]
        scores += [percent(iid, "task_accuracy")] * (scenario == "class")
        costs = [(run["bytes_up"] / 1e6, run["bytes_down"] / 1e6, run["client_bytes"] / 1e3) for run in iid]
        return [*scores, *(f"{mean(cost):.0f}" for cost in zip(*costs)), f"{min(times[name]):.0f}"]

    head = {"class": "With `scenario=class`:", "task": "With `scenario=task`, where"}[scenario]
    told = rows(ROOT / "docs/class-incremental.md", after=head)
    assert {name: cells for name, *cells in told} == {name: row(name) for name in times}


def _scores(runs):
    """ACC and FGT of three runs as on a page."""
    assert len(runs) == 3
    both = [[100 * run[name] for run in runs] for name in ("acc", "fgt")]
    return [f"{mean(own):.1f} ± {pstdev(own):.1f}" for own in both]
