"""The documentation as a site: it builds without a warning, its links lead somewhere, and no page needs the network."""

import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from inspect import isclass, isfunction
from itertools import product
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

import cfl
from cfl.core import options, plugins
from tests.report.browser import PROGRAM, Browser

ROOT = Path(__file__).parents[2]
HOST = "http://site/"  # stands for the site in links


class Page(HTMLParser):
    """Ids, links, and what the browser loads with the page. url: of the page, for relative addresses."""

    def __init__(self, url, text):
        super().__init__()
        self.url, self.ids, self.links, self.loads = url, set(), set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        address = found.get("href") or found.get("src")
        if address is None or found.get("rel") in ("canonical", "prev", "next"):
            return
        (self.links if tag == "a" else self.loads).add(urljoin(self.url, address))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), site_dir=str(folder), strict=True))  # raises Abort for a warning
    return folder


@pytest.fixture(scope="module")
def pages(site):
    """The pages of the site by their address."""
    found = {}
    for path in site.rglob("*.html"):
        url = urljoin(HOST, path.relative_to(site).as_posix().removesuffix("index.html"))
        if path.name != "404.html":  # its links start at the root of the host
            found[url] = Page(url, path.read_text(encoding="utf-8"))
    return found


@pytest.mark.slow
def test_links_and_anchors_lead_somewhere(site, pages):
    broken = []
    for url, page in pages.items():
        for link in page.links:
            address, anchor = link.partition("#")[::2]
            if not address.startswith(HOST):
                continue
            target = site / unquote(urlsplit(address).path.lstrip("/"))
            there = target.is_file() or (target / "index.html").is_file()
            if not there or (anchor and unquote(anchor) not in pages[address].ids):
                broken.append((url, link))
    assert len(pages) > 30 and broken == []


@pytest.mark.slow
def test_pages_show_notebooks_and_the_script(site):
    first = (site / "tutorials/first-run/index.html").read_text(encoding="utf-8")
    assert "ACC is the mean of the last row" in first and list((site / "tutorials/first-run-files").glob("*.png"))
    assert "rotated_fashion" in (site / "tutorials/new-user/index.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_no_page_loads_from_another_host(site, pages):
    assert {load for page in pages.values() for load in page.loads if not load.startswith((HOST, "data:"))} == set()
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert styles and "url(http" not in styles and "@import" not in styles


@pytest.mark.slow
def test_the_reference_has_the_public_names_and_all_options(site, pages):
    ids = set().union(*(page.ids for url, page in pages.items() if "/reference/" in url))
    last = {name.rpartition(".")[2] for name in ids}
    public = [name for name in cfl.__all__ if isclass(getattr(cfl, name)) or isfunction(getattr(cfl, name))]
    assert len(public) > 15 and [name for name in public if name not in last] == []
    for kind, registry in (("strategies", plugins.strategies), ("regularizers", plugins.local)):
        text = (site / f"reference/{kind}/index.html").read_text(encoding="utf-8")
        for name in registry.names():
            section = text.partition(f'<h2 id="{name}">')[2].partition("<h2 ")[0]
            rows = options.describe(registry.get(name))
            assert section and all(f"<td><code>{row['name']}</code></td>" in section for row in rows), name


@pytest.mark.slow
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium on this machine to open the site in")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_pages_open_on_phones_and_desks(site, scheme, tmp_path):
    """Without a line in the console, a request to another host, or a page wider than the window."""

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    browser = Browser(PROGRAM, tmp_path)
    try:
        browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        host = f"http://127.0.0.1:{server.server_address[1]}/"
        for name, width in product(("", "tutorials/first-run/", "reference/strategies/"), (390, 1280)):
            browser.open(f"{host}{name}", width)
            asked = [given["request"]["url"] for kind, given in browser.events if kind == "Network.requestWillBeSent"]
            assert asked and [one for one in asked if not one.startswith((host, "data:", "blob:"))] == []
            faults = {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}
            assert [event for event in browser.events if event[0] in faults] == []
            assert browser.value("[innerWidth, document.documentElement.scrollWidth]") == [width, width]
            wanted = {"light": "default", "dark": "slate"}[scheme]
            assert browser.value("document.body.dataset.mdColorScheme") == wanted
    finally:
        browser.close()
        server.shutdown()
        server.server_close()
