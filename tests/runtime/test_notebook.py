"""Results in notebooks: tables without style sheets, with colours that are readable on each shade."""

import re
from dataclasses import replace

import pytest

import cfl
from cfl.runtime import notebook
from tests import toy


@pytest.fixture(scope="module")
def result():
    return cfl.run(toy.config("tasks=2", "rounds=1"), stream=toy.stream(2))


def luminance(colour):
    """Relative luminance of WCAG 2.1, of a colour such as #1a2b3c or #fff."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    red, green, blue = (int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4))
    linear = [v / 12.92 if v <= 0.03928 else ((v + 0.055) / 1.055) ** 2.4 for v in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_the_text_of_a_result_is_one_short_line(result):
    found = result.metrics
    scores = f"ACC {100 * found['acc']:.1f} % FGT {100 * found['fgt']:z.1f} %"
    assert repr(result) == f"Result(method='fot', benchmark='{found['benchmark']}', seed=0, {scores})"
    long = {**found, "method": "m" * 500, "benchmark": "b" * 500, "seed": 2**63, "fgt": float("nan")}
    text = repr(replace(result, metrics=long))
    assert len(text) <= 200 and "FGT – %" in text


def test_a_notebook_shows_scores_bytes_and_matrix(result):
    shown, found = result._repr_html_(), result.metrics
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", shown)
    up, down = (f"{found[way] / 1e6:.1f}" for way in ("bytes_up", "bytes_down"))
    assert cells[:4] == [f"{100 * found['acc']:.1f}", f"{100 * found['fgt']:z.1f}", up, down]
    (first, _), last = found["accuracy_matrix"]
    assert cells[4:] == [f"{100 * first:.0f}", "", *(f"{100 * value:.0f}" for value in last)]
    assert not re.search(r"<(style|script|link)|class=", shown)


def test_names_are_escaped(result):
    named = {**result.metrics, "method": "<b>&", "benchmark": "<script>"}
    shown = replace(result, metrics=named)._repr_html_()
    assert "&lt;b&gt;&amp; on &lt;script&gt;, seed 0" in shown and "<script" not in shown


def test_a_result_of_one_task_has_a_dash_for_forgetting():
    shown = cfl.run(toy.config("tasks=1", "rounds=1"), stream=toy.stream(1))._repr_html_()
    assert "<td>–</td>" in shown


def test_numbers_are_readable_on_every_shade():
    """Contrast of at least 4.5 (WCAG 2.1, 1.4.3)."""
    for start in range(0, 101, 12):
        rows = [[place / 100] for place in range(start, min(start + 12, 101))]
        pairs = re.findall(r"background:(#\w+);color:(#\w+)", notebook.shaded(rows, range(len(rows)), [0]))
        assert len(pairs) == len(rows)
        for pair in pairs:
            low, high = sorted(map(luminance, pair))
            assert (high + 0.05) / (low + 0.05) >= 4.5


def test_shades_are_those_of_viridis():
    from matplotlib import colormaps

    for place in (0.0, 0.25, 0.5, 0.75, 1.0):
        (digits,) = re.findall(r"background:#(\w+)", notebook.shaded([[place]], [0], [0]))
        ours = [int(digits[start : start + 2], 16) for start in (0, 2, 4)]
        assert ours == pytest.approx(
            [int(one) for one in colormaps["viridis"](place, bytes=True)[:3]], abs=1
        )  # it has 256 steps


def test_a_large_table_shows_numbers_on_request():
    shown = notebook.shaded([[0.5] * 13], [0], range(13))
    assert shown.count('title="50.0 %"') == 13 and ">50<" not in shown
