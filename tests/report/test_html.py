import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from filelock import FileLock

from cfl import cli
from cfl.config.overrides import read_yaml
from cfl.report import elements, figures, html, plots, runs
from tests.report.test_runs import made

VOID = {"meta", "br", "img", "link", "input", "hr", "wbr"}


class Reader(HTMLParser):
    """Parse a page: open tags, attributes, tables and texts."""

    def __init__(self, page):
        super().__init__(convert_charrefs=True)
        self.open, self.attributes, self.tables, self.texts = [], [], [], []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_startendtag(self, tag, attrs):
        self.attributes.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if "td" in self.open or "th" in self.open:
            self.tables[-1][-1][-1] += data


@pytest.fixture(scope="module")
def page(stored):
    return html.page(runs.read([stored]), date="2026-11-21")


@pytest.fixture(scope="module")
def read(page):
    return Reader(page)


def changed(stored, folder, **results):
    """Copy a stored run, with other results."""
    shutil.copytree(stored / "a" / "fot-seed0", folder)
    path = folder / "metrics.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **results}))
    return folder


def test_the_page_is_well_formed_and_makes_no_requests(page, read):
    assert read.open == []
    policy = next(own["content"] for _, own in read.attributes if own.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'")
    for tag, own in read.attributes:
        assert tag not in ("script", "link", "iframe", "object") and not any(name.startswith("on") for name in own)
        for name in ("src", "href", "xlink:href", "srcset", "action"):
            assert own.get(name, "#").startswith(("#", "data:image/png;base64,"))
    assert not re.search(r"@import|url\((?!#)", page)
    assert len(page) < 200_000  # bytes for four small runs


def test_references_resolve_and_ids_are_unique(page, read):
    ids = [own["id"] for _, own in read.attributes if "id" in own]
    used = set(re.findall(r'(?:url\(|href=")#([^")]+)', page))
    assert used and used == set(ids) and len(ids) == len(set(ids))


def test_the_same_runs_give_the_same_page(page, stored):
    assert html.page(runs.read([stored]), date="2026-11-21") == page


def test_the_summary_has_the_stored_figures(read, stored):
    titles, *rows = read.tables[0]
    assert titles[:4] == ["method", "ACC %", "FGT %", "LA %"]
    assert [row[0] for row in rows] == ["fedavg", "fot"]
    for row, paths in zip(rows, (["seed0", "seed1"], ["a/fot-seed0", "a/fot-seed1"]), strict=True):
        found = [json.loads((stored / path / "metrics.json").read_text()) for path in paths]
        for cell, name in zip(row[1:4], ("acc", "fgt", "learning_accuracy"), strict=True):
            values = [100 * run[name] for run in found]
            assert cell == f"{np.mean(values):.1f} ± {np.std(values):.1f}"
        assert row[titles.index("seeds")] == "2"


def test_the_page_says_which_scores_are_bold(page):
    """The rule of `paired.marked`: scores that print alike are equally good, and different seeds are not compared."""
    assert "every score that prints like it or whose paired difference from it has a 95 % interval" in page
    assert "if groups have fewer than two seeds or different ones, nothing is bold." in page


def test_bytes_and_seconds_are_means_of_the_stored_values(read, stored):
    tables = {rows[0][1]: rows for rows in read.tables}
    megabytes, seconds = tables["gpse down, MB"], tables["clients: gpse, s"]
    stored_runs = [stored / "a" / f"fot-seed{seed}" for seed in (0, 1)]
    sent = [json.loads((path / "metrics.json").read_text())["bytes_by_phase"]["gpse"]["down"] for path in stored_runs]
    spent = [json.loads((path / "timing.json").read_text())["clients"]["gpse"] for path in stored_runs]
    assert [megabytes[2][1], seconds[2][1]] == [f"{np.mean(sent) / 1e6:.2f}", f"{np.mean(spent):.2f}"]
    assert megabytes[1][:2] == ["fedavg", "0.00"]  # fedavg has no phase gpse


def test_every_figure_has_a_description(read, stored):
    drawn = [own["aria-label"] for tag, own in read.attributes if tag == "svg"]
    assert len(drawn) == 5 and all(drawn)
    found = [json.loads((stored / f"a/fot-seed{seed}" / "metrics.json").read_text()) for seed in (0, 1)]
    last = 100 * np.mean([run["accuracy_matrix"][-1] for run in found], axis=0)
    (seen,) = [text for text in drawn if text.startswith("Mean accuracy on the tasks seen")]
    assert seen.endswith(f"fot {last.mean():.3g}")
    (first,) = [text for text in drawn if text.startswith("Accuracy on the first task")]
    assert first.endswith(f"fot {last[0]:.3g}")
    lost = 100 * np.mean([run["accuracy_matrix"][0][0] - run["accuracy_matrix"][1][0] for run in found])
    (forgotten,) = [text for text in drawn if text.startswith("Forgetting")]
    assert forgotten.endswith(f"fot {lost:.3g}")


def test_the_panels_have_the_mean_accuracy_matrices_and_the_shares_of_the_layers(read, stored):
    shaded = [rows for rows in read.tables if rows[0] == ["", "0", "1"]]  # two tasks
    found = [json.loads((stored / f"a/fot-seed{seed}" / "metrics.json").read_text()) for seed in (0, 1)]
    (first, _), last = 100 * np.mean([[[a, 0], b] for (a, _), b in (run["accuracy_matrix"] for run in found)], axis=0)
    assert shaded[1][1:] == [["0", f"{first:.0f}", ""], ["1", *(f"{value:.0f}" for value in last)]]
    assert len(shaded) == 5  # of fedavg, of fot, and the three fields of fot's layers
    for rows, field in zip(shaded[2:], ("subspace_use", "coverage", "removed"), strict=True):
        use = 100 * np.mean([[list(task[field].values()) for task in run["by_task"]] for run in found], axis=0)
        layers = list(found[0]["by_task"][0][field])
        assert rows[1:] == [[name, *(f"{v:.0f}" for v in own)] for name, own in zip(layers, use.T, strict=True)]


def test_accuracies_and_losses_are_drawn_from_zero(stored):
    (scene,) = runs.scenes(runs.read([stored]).runs)
    drawn = figures.accuracy(scene.groups, {group.label: plots.Style(0) for group in scene.groups})
    lowest = [re.findall(r"> ?(−?[\d.]+) ?</text>", figure.svg) for figure in drawn]
    titles = ("seen", "first", "at the end", "Forgetting", "loss")
    found = dict(zip(titles, lowest, strict=True))
    for title in ("seen", "first", "at the end", "loss"):
        numbers = [float(text.replace("−", "-")) for text in found[title]]
        assert min(numbers) == 0 and numbers.count(0) == 2  # the first task or round, and the start of the other axis


def test_a_column_of_zeros_is_left_out_of_the_costs(stored, tmp_path):
    phases = {"idle": {"up": 0, "down": 0}, "few": {"up": 4_000, "down": 0}, "train": {"up": 2e6, "down": 0}}
    run = changed(stored, tmp_path / "run", bytes_by_phase=phases)
    (run / "timing.json").write_text(json.dumps({"clients": {"train": 1.5, "idle": 0.004}, "server": {"train": 0}}))
    tables = Reader(html.page(runs.read([run]), date="")).tables
    assert [["method", "train up, MB"], ["fot", "2.00"]] in tables  # 4,000 bytes would print as 0.00 MB
    assert [["method", "clients: train, s"], ["fot", "1.50"]] in tables


def test_scenes_are_blocks_of_the_summary_and_a_single_run_comes_last(stored, tmp_path):
    single = changed(stored, tmp_path / "single")
    path = single / "config.yaml"
    path.write_text(path.read_text().replace("cohort: 10", "cohort: 3"))  # sorts before the 10 of the others
    read = Reader(html.page(runs.read([stored, single]), date=""))
    titles, *rows = read.tables[0]
    assert titles[:2] == ["method", "ACC %"]
    assert [row[0] for row in rows] == [
        "permuted-digits (cohort=10)", "fedavg", "fot", "permuted-digits (cohort=3)", "fot"]  # fmt: skip
    headings = [text for text in read.texts if text.startswith("permuted-digits (cohort=")]
    assert headings[:4] == ["permuted-digits (cohort=10)", "permuted-digits (cohort=3)"] * 2  # of summary and sections


def test_runs_without_results_are_explained(page, stored, tmp_path):
    command = f"cfl-run train --config {stored / 'killed' / 'config.yaml'} --output {stored / 'killed'} --resume"
    assert '<a href="#unfinished">1 is unfinished</a>' in page and f"Folder: {stored / 'killed'}" in page
    assert "<b>permuted-digits, fedavg, seed 0</b> is unfinished before the end of its first round." in page
    assert f'<pre tabindex="0">{command}</pre>' in page

    shutil.copytree(stored / "seed0", tmp_path / "seed0")
    for seed in range(1, 6):
        folder = tmp_path / f"failed{seed}"
        folder.mkdir()
        text = (stored / "seed0" / "config.yaml").read_text()
        folder.joinpath("config.yaml").write_text(
            text.replace("seed: 0", f"seed: {seed}").replace("epochs: 1", "epochs: 9")
        )
        error = {"error": "UpdateError", "message": "loss <is> NaN", "task": 0, "phase": "train", "round": 2}
        date = {"date": "2026-11-24T20:16:20+00:00"}
        (folder / "error.json").write_text(json.dumps({**error, **date}))
    (tmp_path / "failed2" / "error.json").write_text(
        json.dumps({"error": "OSError", "message": "full", "task": None, "phase": None, "round": None, **date})
    )
    failed = html.page(runs.read([tmp_path]), date="")
    Reader(failed)
    first = "permuted-digits, fedavg (local.epochs=9), seed 1</b> failed in task 0, phase train, round 2"
    assert f"<b>{first} on 2026-11-24 at 20:16 UTC.</p><p>UpdateError: loss &lt;is&gt; NaN</p>" in failed
    assert "seed 2</b> failed after the last round on 2026-11-24" in failed
    assert "5 failed</a>" in failed and "<summary>2 more</summary>" in failed  # three are shown


def test_a_run_in_progress_is_not_said_to_be_unfinished(stored, tmp_path):
    shutil.copytree(stored / "seed0", tmp_path / "done")
    shutil.copytree(stored / "killed", tmp_path / "now")
    lock = FileLock(tmp_path / "now" / ".lock")
    with lock:
        busy = html.page(runs.read([tmp_path]), date="")
    assert "seed 0</b> is in progress." in busy and "--resume" not in busy


def test_the_page_names_what_it_leaves_out(stored, tmp_path):
    shutil.copytree(stored / "seed0", tmp_path / "bare")
    for name in ("rounds.jsonl", "timing.json"):
        (tmp_path / "bare" / name).unlink()
    (tmp_path / "bare" / "machine.json").write_text('{"date": "2026-11-21", "machine": "2 cores"}')
    bare = html.page(runs.read([tmp_path]), date="2026-11-21")
    assert "No training loss for 1 run: rounds.jsonl is missing." in bare
    assert "No seconds by phase for 1 run: timing.json is missing." in bare
    assert "Computed on: date 2026-11-21, machine 2 cores" in bare
    assert "Training loss" not in bare and "Seconds by role" not in bare and "Subspaces" not in bare
    assert "fedavg reaches an ACC of" in bare


def test_a_long_name_breaks_between_methods_and_not_within_a_number():
    assert elements.breaking("fot+fedsol (local.lr=0.5)") == "fot+<wbr>fedsol (local.<wbr>lr=<wbr>0.5)"
    assert elements.breaking("fot (rounds=[200,9 x 100])") == "fot (rounds=<wbr>[200,<wbr>9\u00a0x\u00a0100])"


def test_names_are_escaped(stored, tmp_path):
    name = "<script>alert('&\"$x_y$')</script>"
    run = changed(stored, tmp_path / name.replace("/", ""), method=name, bytes_by_phase={name: {"up": 1e6, "down": 0}})
    other = Reader(html.page(runs.read([run]), date=name))
    assert other.open == [] and "script" not in [tag for tag, _ in other.attributes]
    assert sum(name in text for text in other.texts) > 3  # unchanged
    assert other.tables[0][1][0] == name


@pytest.mark.parametrize(
    ("name", "title", "text"),
    [
        ("fwt", "FWT %", "FWT is the mean accuracy on a task just before learning it"),
        ("validation_acc", "val. ACC %", "val. ACC is ACC on held-out training samples."),
        ("task_accuracy", "tasks %", "tasks % is the share of test samples whose task is inferred right."),
    ],
)
def test_the_page_explains_a_column_that_only_some_runs_have(name, title, text, stored, tmp_path, page):
    shown = html.page(runs.read([changed(stored, tmp_path / "run", **{name: 0.5})]), date="")
    assert title in Reader(shown).tables[0][0] and text in shown
    assert text not in page


def test_privacy_is_shown_if_a_run_has_it(stored, tmp_path, page):
    """Of two seeds, one with a client more, whose clients spend (1 + 2 + 3 + 6 + 6) / 5 = 3.6 on average."""
    common = {"delta": 1e-5, "epsilon_of": "all uploads", "noise_multiplier": 1.25}
    each = [{"0": 1.0, "1": 2.0}, {"0": 3.0, "1": 6.0, "2": 6.0}]
    found = [
        changed(stored, tmp_path / f"run{seed}", seed=seed, epsilon=max(own.values()), epsilon_by_client=own, **common)
        for seed, own in enumerate(each)
    ]
    tables = Reader(html.page(runs.read(found), date="")).tables
    assert ["fot", "all uploads", "4", "3.6", "1e-05", "1.25"] in [row for table in tables for row in table]
    assert "epsilon" in tables[0][0] and "Privacy" not in page


def test_the_page_shows_the_configuration_and_its_differences(read, stored):
    options = {row[0]: row[1:] for table in read.tables for row in table if table[0][0] == "option"}
    threshold = read_yaml(stored / "a/fot-seed0/config.yaml")["strategy"]["threshold"]
    assert options["strategy.threshold"] == ["–", str(threshold)]
    assert (stored / "seed0" / "config.yaml").read_text() in read.texts


def test_the_page_has_a_command_that_repeats_a_group(read):
    words = next(text for text in read.texts if text.startswith("# fedavg"))
    options = "--set tasks=2 --set rounds=1 --set partition.clients=4 --set 'model.hidden=[8]'"
    line = f"cfl-run train permuted-digits --method fedavg --seed $seed {options} --output runs/again/fedavg-seed$seed"
    assert f"for seed in 0 1; do {line}; done\n" in words


def test_a_command_writes_each_kind_of_report(stored, tmp_path, capsys):
    outputs = [tmp_path / "new" / f"report{suffix}" for suffix in (".html", ".md", ".tex")]
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", str(stored / "seed0"), *(word for path in outputs for word in ("-o", str(path)))])
    assert stop.value.code == 0 and capsys.readouterr().out.count("written: ") == 3
    starts = ["<!doctype html>", "| method |", "\\begin{tabular}"]
    assert all(path.read_text().startswith(start) for path, start in zip(outputs, starts, strict=True))


@pytest.mark.parametrize(
    ("args", "hint"),
    [
        (("nowhere", "-o", "a.html"), "'nowhere' contains no run"),
        (("nowhere", "-o", "a.svg"), "must end in .html, .csv, .md, .tex, .png, .pdf, not 'a.svg'"),
        (("nowhere",), "'--output'"),
    ],
)
def test_wrong_usage_is_one_line(args, hint, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["report", *args])
    error = capsys.readouterr().err
    assert stop.value.code == 2 and hint in error and len(error.splitlines()) == 1


def test_a_long_stream_has_lines_for_bars_and_few_points_of_loss(stored, tmp_path):
    """20 tasks of 3 groups would be 60 bars, which are too many; 1000 rounds are too many points for a screen."""
    matrix = [[0.5 if task <= after else None for task in range(20)] for after in range(20)]
    folder = changed(stored, tmp_path / "run", accuracy_matrix=matrix)
    rows = [{"task": n // 50, "phase": "train", "round": n % 50, "loss": n % 2} for n in range(1000)]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (scene,) = runs.scenes(runs.read([folder]).runs)
    groups = [runs.RunGroup(name, scene.groups[0].runs) for name in "abc"]
    drawn = {figure.title: figure.svg for figure in figures.accuracy(groups, {g.label: plots.Style(0) for g in groups})}
    assert len(drawn) == 5 and max(map(len, drawn.values())) < 60_000
    loss = drawn["Training loss (dotted: a new task)"]
    assert "a 0.5, b 0.5, c 0.5" in loss.partition(">")[0]  # mean of the last four rounds: 0, 1, 0, 1


def test_groups_are_told_apart_by_colour_and_marker_together():
    styles = [plots.Style(number) for number in range(36)]
    assert len({(style.colour, style.marker) for style in styles}) == 36
    assert len({style.colour for style in styles[:6]}) == len({style.symbol for style in styles[:6]}) == 6


def test_losses_are_drawn_without_the_rounds_of_the_first_seed(stored, tmp_path):
    for seed in (0, 1):
        shutil.copytree(stored / f"seed{seed}", tmp_path / f"seed{seed}")
    (tmp_path / "seed0" / "rounds.jsonl").unlink()
    (scene,) = runs.scenes(runs.read([tmp_path]).runs)
    drawn = {figure.title: figure.svg for figure in figures.accuracy(scene.groups, figures.styles([scene]))}
    lines = (tmp_path / "seed1" / "rounds.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])["loss"]  # of the one run that has losses
    assert f"fedavg {last:.3g}" in drawn["Training loss (dotted: a new task)"]


def test_an_unfinished_run_may_have_a_configuration_without_a_seed(stored, tmp_path):
    shutil.copytree(stored / "seed1", tmp_path / "done")
    (tmp_path / "by hand").mkdir()
    (tmp_path / "by hand" / "config.yaml").write_text("benchmark: permuted-digits\n")
    page = html.page(runs.read([tmp_path]), date="")
    assert "<b>permuted-digits, fedavg, seed 0</b> is unfinished" in page  # method and seed by default


def test_losses_of_runs_with_fewer_rounds_in_a_task_are_aligned_by_task(tmp_path):
    """Of two seeds, a callback has stopped the first task of the second one after a round."""
    rounds = [(0, 1.0), (0, 2.0), (1, 3.0), (1, 4.0)], [(0, 5.0), (1, 7.0), (1, 8.0)]
    each = [replace(made(seed=seed), rounds=[{"task": t, "phase": "train", "loss": loss} for t, loss in own])
            for seed, own in enumerate(rounds)]  # fmt: skip
    longest = figures._longest(each)
    assert longest == {0: 2, 1: 2}
    found = [figures._losses(longest, run).tolist() for run in each]
    np.testing.assert_equal(found, [[1.0, 2.0, 3.0, 4.0], [5.0, np.nan, 7.0, 8.0]])
    assert figures._losses(longest, made(seed=2)).shape == (0,)


def test_a_figure_of_a_strategys_own_may_have_the_name_of_a_share_by_layer(stored, tmp_path):
    by_task = [{"coverage": 0.9, "subspace_use": {"0": 0.5}}, {"coverage": 0.8, "subspace_use": {"0": 0.75}}]
    folder = changed(stored, tmp_path / "run", by_task=by_task)
    shaded = [rows for rows in Reader(html.page(runs.read([folder]), date="")).tables if rows[0] == ["", "0", "1"]]
    assert shaded[1:] == [[["", "0", "1"], ["0", "50", "75"]]]


def test_clients_that_nobody_has_drawn_spend_nothing(stored, tmp_path):
    spent = {"epsilon": 0.0, "epsilon_by_client": {}, "delta": 1e-5, "epsilon_of": "all uploads"}
    found = [
        changed(stored, tmp_path / f"run{seed}", seed=seed, noise_multiplier=1.0 + seed, **spent) for seed in (0, 1)
    ]
    tables = Reader(html.page(runs.read(found), date="")).tables
    assert ["fot", "all uploads", "0", "0", "1e-05", "1.5"] in [row for table in tables for row in table]


def test_a_name_with_dollar_signs_is_drawn_as_it_is(tmp_path):
    """Between them matplotlib would set mathematics, or fail where it is none."""
    plots.accuracy([[0.5]], "my$_$stream", tmp_path / "a.png")
    summary = {"my$_$method": {name: {"mean": 0.5, "std": 0.0} for name in ("acc", "fgt")}}
    plots.comparison(summary, {"my$_$method": [[0.5]]}, "both", tmp_path / "b.png")
    assert (tmp_path / "a.png").stat().st_size > 0 and (tmp_path / "b.png").stat().st_size > 0
