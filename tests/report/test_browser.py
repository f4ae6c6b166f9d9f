"""The page in a real browser; skipped if no browser is installed."""

import base64
import shutil

import pytest
import torch

from cfl.report import html, runs
from cfl.runtime import contact_sheet
from tests.report.browser import PROGRAM, Browser

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine to open the page in")
WIDTHS = (390, 1200)


@pytest.fixture(scope="module")
def url(stored, tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(html.page(runs.read([stored]), date="2026-11-21"), encoding="utf-8")
    return path.as_uri()


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_opens_without_errors_and_without_the_network(browser, url, width):
    browser.open(url, width)
    asked = [given["request"]["url"] for name, given in browser.events if name == "Network.requestWillBeSent"]
    assert [one for one in asked if not one.startswith("data:")] == [url]
    faults = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
    assert [event for event in browser.events if event[0] in faults] == []


@pytest.mark.parametrize("width", WIDTHS)
def test_the_page_fits_the_window(browser, url, width):
    browser.open(url, width)
    assert browser.value("innerWidth") == width
    assert browser.value("document.documentElement.scrollWidth") <= width
    figures = browser.value(
        "[...document.querySelectorAll('figure svg')].map(one => one.getBoundingClientRect().width)"
    )
    assert figures and all(0.6 * 390 < drawn <= width for drawn in figures)


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
def test_text_has_enough_contrast(browser, url, scheme):
    """Contrast of at least 4.5 (WCAG 2.1, 1.4.3), also in figures, which inherit the text colour."""
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    browser.open(url, 1200)
    light = """colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126*r + 0.7152*g + 0.0722*b; }"""
    ground = browser.value(f"({light})(getComputedStyle(document.body).backgroundColor)")
    assert (ground < 0.1) == (scheme == "dark")
    for chosen, property in (("p", "color"), (".quiet", "color"), ("b", "color"), ("figure svg text", "fill")):
        own = browser.value(f"({light})(getComputedStyle(document.querySelector('{chosen}')).{property})")
        low, high = sorted((own, ground))
        assert (high + 0.05) / (low + 0.05) >= 4.5, chosen
    browser.call("Emulation.setEmulatedMedia", features=[])
