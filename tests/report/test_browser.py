"""The page in a real browser; skipped if no browser is installed."""

import base64

import pytest

from cfl.report import html, runs
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
