"""The figure of accuracy over the tasks, as a file of its own."""

import errno
import os
from dataclasses import replace

import matplotlib.figure
import numpy as np
import pytest
from matplotlib.colors import to_hex

import cfl
from cfl.core import ConfigError
from cfl.experiments.compare import plan
from cfl.report import plots, write
from cfl.report.comparison import Comparison
from cfl.report.figures import _forgotten, stream
from cfl.report.runs import read, scenes
from tests.report.conftest import SMALL
from tests.report.test_runs import made


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were written while a test ran."""
    found, save = [], matplotlib.figure.Figure.savefig
    monkeypatch.setattr(
        matplotlib.figure.Figure,
        "savefig",
        lambda self, *args, **named: found.append(self) or save(self, *args, **named),
    )
    return found


def test_a_line_is_the_mean_accuracy_on_the_tasks_seen(stored, tmp_path, drawn):
    write.files([stored], [tmp_path / "figure.png"])
    ((axes,),) = [figure.axes for figure in drawn]
    runs = [run.metrics for run in read([stored]).runs]
    for line, method in zip(axes.get_lines(), ("fedavg", "fot"), strict=True):
        own = [run["accuracy_matrix"] for run in runs if run["method"] == method]
        first, both = (np.mean([row[task][: task + 1] for row in own]) for task in (0, 1))
        np.testing.assert_allclose(line.get_ydata(), [100 * first, 100 * both])
    (legend,) = drawn[0].legends
    assert [text.get_text() for text in legend.get_texts()] == ["fedavg", "fot"]


def test_settings_are_panels_with_one_legend(stored, tmp_path, drawn):
    for method in ("fedavg", "fot"):
        config = cfl.resolve("permuted-digits", method=method, overrides=[*SMALL, "partition.name=shards"])
        cfl.run(config, output=tmp_path / method)
    write.files([stored, tmp_path], [tmp_path / "figure.png"])
    (figure,) = drawn
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["permuted-digits, partition.name=iid", "permuted-digits, partition.name=shards"]
    assert len(figure.legends) == 1


def test_runs_of_one_task_are_left_out(stored, tmp_path, drawn):
    config = cfl.resolve("permuted-digits", method="gpm", overrides=[*SMALL, "tasks=1"])
    cfl.run(config, output=tmp_path / "gpm")
    write.files([stored, tmp_path], [tmp_path / "figure.png"])
    assert [len(line.get_xdata()) for axes in drawn[0].axes for line in axes.get_lines()] == [2, 2]


def test_the_legend_fits(stored, drawn):
    (scene,) = scenes(read([stored]).runs)
    many = [replace(scene.groups[0], label=f"fot (strategy.threshold=0.{i}, strategy.model=local)") for i in range(20)]
    stream([replace(scene, groups=many)], "png")
    (figure,), inside = drawn, drawn[0].bbox
    box = figure.legends[0].get_window_extent()
    assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1


@pytest.mark.parametrize("accuracies", [[88.7, 80.0, 78.0], [0.0, 0.0, 0.0], [-3.0, 5.0, 80.0]])
def test_markers_on_a_page_are_whole(accuracies, drawn):
    one = plots.Series("fedavg", plots.Style(0), np.arange(3), np.array(accuracies), np.zeros(3))
    plots.lines([one], about="accuracy")
    (axes,) = drawn[0].axes
    (line,) = axes.get_lines()
    highest = axes.transData.transform((0, max(accuracies)))[1]
    assert (axes.bbox.y1 - highest) * 72 / drawn[0].dpi > line.get_markersize() / 2  # points
    assert min(accuracies) < 0 or axes.get_ylim()[0] == 0


def test_a_comparison_has_the_styles_of_a_report_and_hides_no_points(tmp_path, drawn):
    groups = plan("permuted-digits", "fedavg,fedprox", "0", tmp_path, overrides=SMALL)
    for group in groups:
        for run in group.runs:
            cfl.run(run.config, output=run.folder)
    Comparison("permuted-digits", None, groups, "fedavg").draw(tmp_path / "compare.png")
    bars, over_the_stream = drawn[0].axes
    lines, styles = over_the_stream.get_lines(), [plots.Style(0), plots.Style(1)]
    assert [line.get_label() for line in lines] == ["fedavg", "fedprox"]
    assert [(line.get_color(), line.get_marker()) for line in lines] == [(one.colour, one.marker) for one in styles]
    assert {line.get_markerfacecolor() for line in lines} == {"none"}
    assert not {to_hex(bar.get_facecolor()).upper() for bar in bars.patches} & {one.colour for one in styles}


def test_long_names_leave_a_comparison_its_axes(tmp_path, drawn, recwarn):
    """Each of the two axes keeps 2.5 inches at least, whatever the names; 78 characters have no place to break."""
    names = [
        f"{method}, partition.name={own}, strategy.threshold=0.94"
        for method in ("fot", "joint")
        for own in ("iid", "shards")
    ]
    score = {"mean": 0.5, "std": 0.1}
    for labels in (names, ["x" * 78, "fot"]):
        summaries = {label: {"acc": score, "fgt": score} for label in labels}
        plots.comparison(summaries, {label: [[0.9, None], [0.8, 0.9]] for label in labels}, "both", tmp_path / "b.png")
        assert all(axes.get_window_extent().width / drawn[-1].dpi > 2.5 for axes in drawn[-1].axes)
    assert not recwarn.list


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_same_runs_give_the_same_file(kind, begin, stored, tmp_path):
    paths = [tmp_path / f"{name}.{kind}" for name in ("one", "two")]
    write.files([stored], paths)
    one, two = (path.read_bytes() for path in paths)
    assert one == two and one.startswith(begin)


def test_a_report_that_cannot_be_written_leaves_the_last_one(stored, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    table = tmp_path / "table.md"
    table.write_text("of last week")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"table\.md' cannot be written \(No space left on device\)"):
        write.files([stored], [table])
    assert [path.name for path in tmp_path.iterdir()] == ["table.md"] and table.read_text() == "of last week"


def test_runs_of_one_task_have_no_figure(tmp_path):
    config = cfl.resolve("permuted-digits", method="fedavg", overrides=[*SMALL, "tasks=1"])
    cfl.run(config, output=tmp_path / "run")
    with pytest.raises(ConfigError, match="no run has two tasks"):
        write.files([tmp_path], [tmp_path / "figure.png"])
    assert not (tmp_path / "figure.png").exists()


def test_the_lines_of_a_highlighted_method_are_wide_and_on_top(stored, tmp_path, drawn):
    write.files([stored], [tmp_path / "figure.png"], "fedavg")
    first, second = drawn[0].axes[0].get_lines()  # fedavg, fot
    assert first.get_linewidth() > second.get_linewidth() and first.get_zorder() > second.get_zorder()
    write.files([stored], [tmp_path / "page.html"], "fedavg")
    widths = [{line.get_linewidth() for line in figure.axes[0].get_lines()} for figure in drawn[1:]]
    assert {first.get_linewidth(), second.get_linewidth()} in widths


def test_a_method_without_runs_and_a_table_cannot_be_highlighted(stored, tmp_path):
    with pytest.raises(ConfigError, match="unknown method 'fots'; did you mean 'fot'"):
        write.files([stored], [tmp_path / "figure.png"], "fots")
    with pytest.raises(ConfigError, match="--highlight is for lines"):
        write.files([stored], [tmp_path / "table.md"], "fot")


def test_forgetting_of_a_task_counts_from_its_own_end():
    matrix = [[0.9, None, None], [0.8, 0.7, None], [0.5, 0.6, 0.9]]
    assert _forgotten(made(accuracy_matrix=matrix)).tolist() == pytest.approx([40, 10])
