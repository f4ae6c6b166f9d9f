"""A comparison in a notebook."""

import re

import cfl
from cfl.experiments.compare import plan
from cfl.report.comparison import Comparison
from tests.report.conftest import SMALL


def test_a_notebook_shows_the_summary_and_paired_differences(tmp_path):
    groups = plan("permuted-digits", "fedavg,fedprox", "0,1", tmp_path, overrides=SMALL)
    for group in groups:
        for run in group.runs:
            cfl.run(run.config, output=run.folder)
    found = Comparison("permuted-digits", "<smoke>", groups, "fedavg")
    shown = found._repr_html_()
    assert shown.count("<table>") == 2 and "&lt;smoke&gt; scale" in shown and "<smoke>" not in shown
    cells = re.findall(r"<td>([^<]*)</td>", shown)
    heads = re.findall(r"<th>([^<]*)</th>", shown)
    assert heads[:3] == ["method", "ACC %", "FGT %"] and cells[0] == "fedavg"
    accs = [100 * metrics["acc"] for metrics in found.results["fedavg"]]
    mean, std = sum(accs) / 2, abs(accs[0] - accs[1]) / 2
    assert cells[1] == f"{mean:.1f} ± {std:.1f}"
    assert "fedprox less fedavg" in cells
