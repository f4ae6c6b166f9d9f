"""The summary as text: best cells, and Markdown and LaTeX tables."""

from pathlib import Path

import pytest

from cfl.report import tables
from cfl.report.tables import Cell


def row(acc, fgt=None, seeds=1, **costs):
    runs = [{"seed": seed, "acc": acc, "fgt": fgt, **costs} for seed in range(seeds)]
    return tables.summary(runs)


def test_the_given_rows_are_marked_as_the_best():
    rows = [row(0.8004, 0.2), row(0.7996, 0.1), row(0.6)]
    cells = tables.cells(rows, ["acc", "fgt"], {"acc": {0, 1}, "fgt": {1}})
    assert [[cell.text for cell in line] for line in cells] == [["80.0", "20.0"], ["80.0", "10.0"], ["60.0", "–"]]
    assert [[cell.best for cell in line] for line in cells] == [[True, False], [True, True], [False, False]]


def test_zero_prints_without_a_sign():
    ((cell,),) = tables.cells([row(0.8, fgt=-0.0004)], ["fgt"])
    assert cell.text == "0.0"
    assert [tables.percent(value) for value in (-0.0006, 0.0004)] == ["-0.1", "0.0"]


def test_costs_have_the_units_of_their_titles_and_missing_costs_are_a_dash():
    names = ["acc", "bytes_up", "bytes_down", "client_bytes", "seconds", "server_seconds", "seeds"]
    (line,) = tables.cells([row(0.5, bytes_up=2.5e6, bytes_down=7.5e6, client_bytes=4.5e3, seconds=3, seeds=2)], names)
    assert tables.head(names[1:5]) == ["up MB", "down MB", "stored KB", "seconds"]
    assert [cell.text for cell in line] == ["50.0 ± 0.0", "2.5", "7.5", "4.5", "3.0", "–", "2"]


def test_results_of_a_run_are_lines_below_its_matrix():
    """(20 % + 60 %) / 2 = 40 % for the local models; forgetting is undefined after one task."""
    found = {"accuracy_matrix": [[0.5]], "local_accuracy": [0.2, 0.6], "acc": 0.5, "fgt": None}
    assert list(tables.run(found, "title", Path("folder")))[1:] == [
        "Local models of the last cohort: 40.0% on average, 20.0% for the worst",
        "ACC 50.0%; results in folder",
    ]


@pytest.mark.parametrize(
    ("local", "told"),
    [
        ([0.2, None, 0.6], "40.0% on average, 20.0% for the worst, 1 of 3 with outputs that are not finite"),
        ([None], "1 of 1 with outputs that are not finite"),
    ],
)
def test_local_models_without_an_accuracy_are_counted(local, told):
    """As `LocalModels` records those whose outputs are not finite."""
    found = {"accuracy_matrix": [[0.5]], "local_accuracy": local, "acc": 0.5, "fgt": None}
    assert list(tables.run(found, "title", Path("folder")))[1] == f"Local models of the last cohort: {told}"


def test_runs_that_failed_for_one_reason_share_a_row():
    table = tables.failures(
        {"a, seed 0": "loss is NaN", "b, seed 0": "Traceback\n  ...\nOSError: full\n", "a, seed 1": "loss is NaN"}
    )
    assert [list(column.cells) for column in table.columns] == [
        ["a, seed 0\na, seed 1", "b, seed 0"],
        ["loss is NaN", "OSError: full"],
    ]


def test_markdown():
    text = tables.markdown(["setting", "method", "ACC %"], [[Cell(""), Cell("a`b|c"), Cell("1.0 ± 0.5", True)]], 2)
    assert text == "| setting | method | ACC % |\n| --- | --- | ---: |\n|  | `a'b\\|c` | **1.0 ± 0.5** |\n"


def test_latex():
    text = tables.latex(["method", "ACC %"], [[Cell("a_b{1}~\\^"), Cell("1.0 ± 0.5", True)], [Cell("c"), Cell("–")]])
    assert text == (
        "\\begin{tabular}{lr}\n\\toprule\nmethod & ACC \\% \\\\\n\\midrule\n"
        "a\\_b\\{1\\}\\textasciitilde{}\\textbackslash{}\\textasciicircum{} & \\textbf{1.0 $\\pm$ 0.5} \\\\\n"
        "c & -- \\\\\n\\bottomrule\n\\end{tabular}\n"
    )


@pytest.mark.parametrize("name", ["acc", "learning_accuracy", "fgt"])
def test_the_mean_and_the_population_deviation_are_printed(name):
    summary = tables.summary([{"seed": 0, "acc": 0, name: 0.2}, {"seed": 1, "acc": 0, name: 0.4}])
    ((cell,),) = tables.cells([summary], [name])
    assert cell.text == "30.0 ± 10.0"


def test_a_column_of_held_out_samples_is_there_if_a_run_holds_some_out():
    held = tables.summary([{"seed": seed, "acc": 0.1, "validation_acc": acc} for seed, acc in enumerate((0.2, 0.4))])
    titles, _ = tables.compared_texts({"a": row(0.1, 0.0), "b": held})
    assert titles[:4] == ["method", "ACC %", "FGT %", "val. ACC %"]
    assert [[cell.text for cell in line] for line in tables.cells([held], ["validation_acc"])] == [["30.0 ± 10.0"]]


def test_a_column_of_inferred_tasks_is_there_if_a_run_infers_them():
    without, inferred = row(0.4, 0.1), row(0.7, 0.1, task_accuracy=0.75)
    heads = [tables.compared_texts(rows)[0] for rows in ({"a": without}, {"a": without, "b": inferred})]
    assert ["tasks %" in titles for titles in heads] == [False, True]
    assert [[cell.text for cell in line] for line in tables.cells([without, inferred], ["task_accuracy"])] == [
        ["–"], ["75.0"]]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("rounds=[200,100,100,100], local.lr=0.1", "rounds=[200,3 x 100], local.lr=0.1"),
        ("dropout=[0.5,0.5,0.5]", "dropout=[3 x 0.5]"),
        ("[11,1,1,1,111]", "[11,3 x 1,111]"),  # whole entries are counted
        ("[2,2,1]", "[2,2,1]"),
        ("x,x,x", "x,x,x"),  # no list
    ],
)
def test_equal_entries_of_a_list_are_written_once(text, short):
    assert tables.shortened(text) == short
    assert tables.unbroken(short) == short.replace("3 x ", "3\u00a0x\u00a0")  # the only spaces that may not break
