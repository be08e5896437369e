"""A browser that people use, a service with real sockets and TLS, and jobs in every state."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from synvirt.programs import find
from tests.fakes.service import PASSWORD, USER, Service
from tests.needs import need

# What the pages look like, for a person: they are kept only with SCREENSHOTS in the environment, since no test looks at them.
PICTURES = Path(__file__).parent.parent.parent / "build" / "screenshots"
AXE = (Path(__file__).parent / "vendor" / "axe.min.js").read_text()
# What axe finds that keeps people from using the page. Its whole report is ten times as long, and takes longer than its search.
# What a rule finds has the impact of the rule: a rule of another one need not run.
SERIOUS = """
axe.run(document, {
    resultTypes: ['violations'],
    elementRef: false,
    rules: Object.fromEntries(axe._audit.rules
        .filter(({impact}) => ['minor', 'moderate'].includes(impact))
        .map(({id}) => [id, {enabled: false}])),
}).then(({violations}) => violations
    .filter(({impact}) => ['serious', 'critical'].includes(impact))
    .map(({id, nodes}) => `${id}: ${JSON.stringify(nodes.slice(0, 3).map(({target}) => target))}`))
"""
# Lines of the browser's console that say that a page is wrong: its policy's, and those of htmx. A request that the next one
# replaces, or that a user leaves behind, is aborted as it should be. An `afterRequest` comes beside the error that it is about.
COMPLAINT = re.compile("Content Security Policy|^htmx:(?!sendAbort|afterRequest)")
# Nothing of the browser's own goes out.
QUIET = [
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
# Five seconds are Playwright's own patience: too little beside other tests.
expect.set_options(timeout=60_000)


def chromium() -> str:
    """The path of Chromium without windows: the same engine, and a page takes a third of the processor's time. Where only the
    browser with windows is installed, its path."""
    return find("chromium-headless-shell") or find("chromium") or need("chromium-headless-shell", "chromium-headless-shell")


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """One for all tests of this folder that a worker runs: its start, and above all that of its driver, takes longer than most
    tests. What a test leaves in it goes with the test's context."""
    program = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", *QUIET], timeout=60_000)
        yield browser
        browser.close()


@contextmanager
def serving(service: Service) -> Iterator[str]:
    """The service's address."""
    with service.served() as server:
        yield server.address


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """A service and its address. One a module: each test has jobs of its own."""
    made = Service(tmp_path_factory.mktemp("web"))
    with serving(made) as address:
        yield made, address
    made.close()


@pytest.fixture(scope="module")
def service(served: tuple[Service, str]) -> Service:
    return served[0]


@pytest.fixture
def context(browser: Browser, served: tuple[Service, str]) -> Iterator[BrowserContext]:
    context = opened(browser, served[1])
    yield context
    context.close()


@pytest.fixture
def page(context: BrowserContext) -> Iterator[Page]:
    """A page of the service. A complaint of its scripts or its policy fails the test."""
    page = context.new_page()
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda line: complaints.append(line.text) if COMPLAINT.search(line.text) else None)
    yield page
    assert complaints == []


def opened(
    browser: Browser, address: str, *, password: str = PASSWORD, log_in: bool = True, base: str = "", **options: Any
) -> BrowserContext:
    # The certificate is the service's own.
    context = browser.new_context(
        base_url=address,
        ignore_https_errors=True,
        reduced_motion="reduce",
        **options,
    )
    context.set_default_timeout(60_000)
    if log_in:
        answer = context.request.post(f"{address}{base}/login", form={"user": USER, "password": password}, max_redirects=0)
        assert answer.status == 303, answer.text()
    return context


def serious(page: Page) -> list[str]:
    """Rules that the page breaks, each with the first elements. The driver reads axe into the page, once a document: our policy
    stays as it is."""
    if not page.evaluate("'axe' in window"):
        page.evaluate(AXE)
    found: list[str] = page.evaluate(SERIOUS)
    return found


def look_at(page: Page, name: str) -> None:
    """Can it be read at a desk in the light, and on a phone in the dark? Two of the four are enough: no rule of the styles
    asks for a width and a colour scheme at once."""
    page.mouse.move(0, 0)  # what is pointed at is drawn by itself, and not in a picture of the whole page
    for scheme, device, width in (("light", "desk", 1200), ("dark", "phone", 360)):
        page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        page.set_viewport_size({"width": width, "height": 844})
        picture(page, f"{name}-{device}-{scheme}")
        assert serious(page) == [], name
        too_wide = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert too_wide <= 0, f"{name} is wider than a {device}"


def picture(page: Page, name: str) -> None:
    if "SCREENSHOTS" not in os.environ:
        return
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=True)
