"""The page in a real browser; skipped if no browser is installed."""

import base64
import json
import shutil

import pytest
import torch

from cfl.report import html, runs
from cfl.runtime import contact_sheet
from tests import toy
from tests.report.browser import PROGRAM, Browser

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine to open the page in")
WIDTHS = (390, 1280)


@pytest.fixture(scope="module")
def url(stored, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.page(runs.read([stored]), date="2026-11-21"), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def wide(stored, tmp_path_factory):
    """A page with two settings, long names of methods, a method that is clearly the best, and a failed run."""
    folder = tmp_path_factory.mktemp("wide")
    for number, (old, new) in enumerate(
        (("", ""), ("threshold: 0.9", "threshold: 0.987654321"), ("lr: 0.05", "lr: 0.1"))
    ):
        for seed in (0, 1):
            run = folder / f"{number}-{seed}"
            shutil.copytree(stored / "a" / f"fot-seed{seed}", run)
            config, metrics = (run / name for name in ("config.yaml", "metrics.json"))
            config.write_text(config.read_text().replace(old, new, 1))
            found = json.loads(metrics.read_text())
            metrics.write_text(json.dumps({**found, "acc": 0.1 + 0.4 * number + 0.01 * seed * number, "fgt": 0.112}))
    shutil.copytree(stored / "killed", folder / "failed")
    error = {"error": "UpdateError", "message": "NaN " * 50, "task": 0, "phase": "train", "round": 2}
    (folder / "failed" / "error.json").write_text(json.dumps({**error, "date": "2026-11-24T20:16:20+00:00"}))
    path = folder / "report.html"
    path.write_text(html.page(runs.read([folder]), date="2026-11-21"), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(params=["url", "wide"])
def any_page(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("width", toy.quick(390, of=WIDTHS))
def test_the_page_opens_without_errors_and_without_the_network(browser, any_page, width):
    url = any_page
    browser.open(url, width)
    asked = [given["request"]["url"] for name, given in browser.events if name == "Network.requestWillBeSent"]
    assert [one for one in asked if not one.startswith("data:")] == [url]
    faults = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
    assert [event for event in browser.events if event[0] in faults] == []


@pytest.mark.parametrize("width", (*WIDTHS, 800, 1100))
def test_the_page_fits_the_window(browser, any_page, width):
    browser.open(any_page, width)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    figures = browser.value(
        "[...document.querySelectorAll('figure svg')].map(one => one.getBoundingClientRect().width)"
    )
    assert figures and all(0.6 * 390 < drawn <= width for drawn in figures)


@pytest.mark.parametrize("page", ["url", "wide"])
def test_acc_is_seen_on_a_phone_without_scrolling(browser, request, page):
    browser.open(request.getfixturevalue(page), 390)
    rows = browser.value("""[...document.querySelector('table').querySelectorAll('tr:not(:has(.block))')].map(row => {
        const box = row.cells[1].getBoundingClientRect(); return [row.cells[1].textContent, box.left, box.right]; })""")
    assert rows[0][0] == "ACC %" and len(rows) > 2
    assert all(0 < left < right < 390 for _, left, right in rows)
    columns = browser.value("document.querySelector('table').rows[0].cells.length")
    assert columns == 8  # the others are reached by scrolling the table, beside the names, which stay
    stays = """(() => { const box = document.querySelector('.scroll'); box.scrollLeft = 150;
        return [box.scrollLeft, document.querySelector('th.name').getBoundingClientRect().left]; })()"""
    assert browser.value(stays) == [150, 16]


@pytest.mark.parametrize(("number", "rows"), [(1, [1]), (2, [2]), (3, [3]), (4, [2, 2]), (5, [2, 3]), (7, [2, 2, 3])])
def test_no_row_of_figures_is_half_empty(browser, url, number, rows):
    browser.open(url, 1280)
    places = browser.value(f"""(() => {{ const grid = document.querySelector('.figures'), one = grid.children[0];
        grid.replaceChildren(...Array.from({{length: {number}}}, () => one.cloneNode(true)));
        const left = grid.getBoundingClientRect().left;
        return [...grid.children].map(it => it.getBoundingClientRect())
            .map(box => [Math.round(box.top), box.left - left, box.right - left]); }})()""")
    width = browser.value("document.querySelector('.figures').clientWidth")
    tops = sorted({top for top, _, _ in places})
    assert [sum(place[0] == top for place in places) for top in tops] == rows
    if number > 1:  # each row reaches from the left to the right
        assert [min(left for top, left, _ in places if top == own) for own in tops] == [0] * len(tops)
        ends = [max(right for top, _, right in places if top == own) for own in tops]
        assert ends == pytest.approx([width] * len(tops), abs=1)


def test_small_multiples_share_rows_and_scale(browser, wide):
    browser.open(wide, 1280)
    ends = browser.value("""[...document.querySelectorAll('.panels')].map(
        one => [...one.children].map(it => it.offsetTop + it.offsetHeight))""")
    assert [len(row) for row in ends] == [2, 6, 1, 3]  # two groups, with three fields each; then a group alone
    assert len(set(ends[0])) == len(set(ends[2])) == len(set(ends[3])) == 1
    assert [len({*ends[1][start : start + 3]}) for start in (0, 3)] == [1, 1]  # a row for each group
    assert browser.value("document.querySelectorAll('.scale').length") == 4


def test_the_columns_of_a_large_matrix_are_narrow(browser, stored, tmp_path):
    """A column is 1.2rem wide, or what a head of two digits needs; numbers in cells, of smaller tables, need 3rem."""
    shutil.copytree(stored / "seed0", tmp_path / "run")
    path = tmp_path / "run" / "metrics.json"
    found, tasks = json.loads(path.read_text()), 24
    matrix = [[0.5 if seen <= last else None for seen in range(tasks)] for last in range(tasks)]
    path.write_text(json.dumps({**found, "accuracy_matrix": matrix}))
    (tmp_path / "page.html").write_text(html.page(runs.read([tmp_path]), date="2026-11-21"), encoding="utf-8")
    browser.open((tmp_path / "page.html").as_uri(), 1280)
    widths = browser.value("[...document.querySelectorAll('.shaded thead th')].map(one => one.offsetWidth / 16)")
    assert len(widths) == tasks + 1 and max(widths) < 1.8


@pytest.mark.parametrize("width", WIDTHS)
def test_no_text_of_a_figure_is_cut(browser, url, width):
    browser.open(url, width)
    outside = """[...document.querySelectorAll('figure svg text')].filter(text => {
        const own = text.getBoundingClientRect(), all = text.closest('svg').getBoundingClientRect();
        return own.left < all.left - 1 || own.right > all.right + 1 || own.bottom > all.bottom + 1;
    }).map(text => text.textContent)"""
    assert browser.value(outside) == []


def test_a_wide_table_scrolls_in_its_own_box(browser, url):
    browser.open(url, 390)
    boxes = browser.value("[...document.querySelectorAll('.scroll')].map(one => [one.clientWidth, one.scrollWidth])")
    assert any(inside > box for box, inside in boxes) and all(box <= 390 for box, _ in boxes)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_large_sheet_of_images_scrolls_with_its_numbers_beside_the_rows(browser, painted, tmp_path, width):
    shutil.copytree(painted, tmp_path / "runs")
    images = torch.zeros(40, 30, 1, 4, 4, dtype=torch.uint8)  # 870 x 1160 pixels
    (tmp_path / "runs/paints-seed0/images/task-2.png").write_bytes(contact_sheet.png(images))
    page = tmp_path / "report.html"
    page.write_text(html.page(runs.read([tmp_path / "runs"]), date="2026-11-24"), encoding="utf-8")
    browser.open(page.as_uri(), width)
    assert browser.value("document.documentElement.scrollWidth") <= width
    parts = "const [box, all, one] = ['.scroll', '.grid', 'img'].map(it => document.querySelector(`.sheet ${it}`));"
    sizes = "[box.clientWidth, box.clientHeight, one.clientWidth, one.clientHeight, one.naturalWidth]"
    box_width, box_height, *shown = browser.value(f"(() => {{ {parts} return {sizes}; }})()")
    assert shown == [30 * 29 - 1, 40 * 29 - 1, 30 * 29 - 1] and box_width < 600 and box_height < 700
    middles = """(() => { const top = document.querySelector('.sheet img').getBoundingClientRect().top;
        return [...document.querySelector('.sheet .rows').children].map(one => {
            const own = one.getBoundingClientRect(); return (own.top + own.bottom) / 2 - top; }); })()"""
    assert browser.value(middles) == pytest.approx([29 * row + 14 for row in range(40)], abs=3)
    browser.call("Emulation.setEmulatedMedia", media="print")
    wide, beside, drawn = browser.value(f"""(() => {{ {parts} const rows = document.querySelector('.sheet .rows');
        return [document.documentElement.scrollWidth, rows.clientHeight, one.clientHeight]; }})()""")
    browser.call("Emulation.setEmulatedMedia", media="")
    assert wide <= width and beside == drawn < 40 * 29  # on paper, a sheet shrinks to its column


def test_folded_text_is_printed(browser, url):
    browser.open(url, 800)
    shown = "document.querySelector('details pre').checkVisibility()"
    assert browser.value(shown) is False
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.value(shown) is True
    printed = browser.call("Page.printToPDF", preferCSSPageSize=True)["data"]
    browser.call("Emulation.setEmulatedMedia", media="")
    assert base64.b64decode(printed).startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_enough_contrast(browser, wide, scheme):
    """Contrast of at least 4.5 (WCAG 2.1, 1.4.3), also in figures, which inherit the text colour."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(wide, 1280)
    light = """colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126*r + 0.7152*g + 0.0722*b; }"""
    ground = browser.value(f"({light})(getComputedStyle(document.body).backgroundColor)")
    assert (ground < 0.1) == (scheme == "dark")
    for chosen, property in (
        ("p", "color"),
        (".quiet", "color"),
        ("td b", "color"),
        ("a", "color"),
        (".shaded th", "color"),
        ("figure svg text", "fill"),
    ):
        own = browser.value(f"({light})(getComputedStyle(document.querySelector('{chosen}')).{property})")
        low, high = sorted((own, ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, chosen
    browser.call("Emulation.setEmulatedMedia", features=[])
