"""The figure of accuracy over the tasks, as a file of its own."""

import matplotlib.figure
import numpy as np
import pytest

import cfl
from cfl.core import ConfigError
from cfl.report import write
from cfl.report.runs import read
from tests.report.conftest import SMALL


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


@pytest.mark.parametrize(("kind", "begin"), [("png", b"\x89PNG"), ("pdf", b"%PDF")])
def test_the_same_runs_give_the_same_file(kind, begin, stored, tmp_path):
    paths = [tmp_path / f"{name}.{kind}" for name in ("one", "two")]
    write.files([stored], paths)
    one, two = (path.read_bytes() for path in paths)
    assert one == two and one.startswith(begin)


def test_runs_of_one_task_have_no_figure(tmp_path):
    config = cfl.resolve("permuted-digits", method="fedavg", overrides=[*SMALL, "tasks=1"])
    cfl.run(config, output=tmp_path / "run")
    with pytest.raises(ConfigError, match="needs a run of two tasks or more"):
        write.files([tmp_path], [tmp_path / "figure.png"])
    assert not (tmp_path / "figure.png").exists()
