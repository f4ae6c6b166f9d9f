"""Images that methods have made, on the page."""

import base64
import re

import pytest

from cfl.core import ConfigError
from cfl.report import html, runs
from tests.report.test_html import Reader


@pytest.fixture(scope="module")
def page(painted):
    return html.page(runs.read([painted]), date="2026-11-24")


def pictures(page):
    return [own for tag, own in Reader(page).attributes if tag == "img"]


def test_the_last_picture_of_each_run_comes_first_and_earlier_ones_are_folded(page, painted):
    section = page.partition("<h2>Synthetic images</h2>")[2].partition("</section>")[0]
    assert re.findall(r"</span> (\w+), seed (\d), task (\d)</figcaption>", section) == [
        ("Paints", seed, task) for seed in "01" for task in "21"
    ]
    folded = "".join(re.findall(r"<details>.*?</details>", section, re.DOTALL))
    assert re.findall(r"task (\d)</figcaption>", folded) == ["1", "1"]
    assert "<summary>Earlier task of Paints, seed 1</summary>" in folded
    assert "Each row is a class, and the numbers of the rows are those of the classes of the head." in section


def test_pictures_are_embedded_with_their_size_and_a_description(page, painted):
    found = pictures(page)
    assert [own["alt"] for own in found] == [
        f"Images made by Paints, seed {seed}, task {task}; {task + 1} rows, a row for each class of the head"
        for seed in (0, 1)
        for task in (2, 1)
    ]
    assert (found[0]["width"], found[0]["height"]) == ("131", "98")  # 4 x 3 images of 32 pixels, one pixel apart
    start, _, data = found[1]["src"].partition(",")
    assert start == "data:image/png;base64"
    assert base64.b64decode(data) == (painted / "paints-seed0" / "images" / "task-1.png").read_bytes()


def test_rows_are_numbered(page):
    numbers = re.findall(r'<div class="rows" aria-hidden="true">(.*?)</div>', page)
    assert numbers[0] == "<span>0</span><span>1</span><span>2</span>" and len(numbers) == 4


def test_the_page_with_pictures_is_well_formed(page):
    assert Reader(page).open == []


def test_only_runs_with_images_have_a_section(stored, painted):
    assert "Synthetic images" not in html.page(runs.read([stored]), date="")
    both = html.page(runs.read([stored, painted]), date="")
    assert len(pictures(both)) == 4 and both.count("<h2>Synthetic images</h2>") == 1


def test_names_are_escaped(painted):
    found = runs.read([painted])
    for run in found.runs:
        run.metrics["method"] = "<b>'\"&"
    other = Reader(html.page(found, date=""))
    alts = [own["alt"] for tag, own in other.attributes if tag == "img"]
    assert other.open == [] and len(alts) == 4
    assert all(alt.startswith("Images made by <b>'\"&, seed") for alt in alts)


def test_a_damaged_picture_is_named(painted, tmp_path):
    found = runs.read([painted])
    (tmp_path / "task-2.png").write_text("no picture")
    found.runs[0].sheets[2] = tmp_path / "task-2.png"
    with pytest.raises(ConfigError, match=r"task-2\.png' is damaged; repeat the run, or move the file away"):
        html.page(found, date="")
