"""What an open page says while the service does not answer, and that it goes on by itself afterwards."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from synvirt.model.kinds import State
from tests.fakes.service import QUICK, Service
from tests.running.ports import free_port
from tests.web import jobs
from tests.web.conftest import look_at, opened, serving
from tests.web.test_waves import made

SILENT_MS = 41_000


@pytest.mark.timeout(180)
def test_pages_say_that_the_service_is_away_until_it_is_back(browser: Browser, tmp_path: Path) -> None:
    before = Service(tmp_path, listen=f"127.0.0.1:{free_port()}")  # which it gets again
    here = jobs.added(before, "here", (State.QUEUED, 5), (State.COPYING_FULL, 4))
    wave = made(before, "db01")
    before.waves.go(wave.id)
    with ExitStack() as stack:
        with serving(before) as address:
            context = stack.enter_context(opened(browser, address))
            pages = [context.new_page() for _ in range(3)]
            for page, path in zip(pages, ("/", f"/migrations/{here}", f"/waves/{wave.id}"), strict=True):
                page.goto(path)
                expect(page.locator("#away")).to_be_empty()
        before.close()
        for page in pages:
            expect(page.locator("#away")).to_contain_text("The service does not answer since")
        look_at(pages[0], "away")
        after = Service(tmp_path, listen=address.removeprefix("https://"))
        stack.callback(after.close)
        stack.enter_context(serving(after))
        for page in pages:
            expect(page.locator("#away")).to_be_empty()


@pytest.mark.parametrize("path", ["/", "/migrations/{job}"])
def test_a_service_that_is_silent_is_away_too(browser: Browser, tmp_path: Path, path: str) -> None:
    """It was stopped, or its machine was: the connection stays, and nothing comes."""
    silent = Service(tmp_path, pace=replace(QUICK, heartbeat_every_s=600))
    with ExitStack() as stack:
        stack.callback(silent.close)
        job = jobs.added(silent, "here", (State.QUEUED, 5), (State.COPYING_FULL, 4))
        context = stack.enter_context(opened(browser, stack.enter_context(serving(silent))))
        page = context.new_page()
        page.clock.install()
        with page.expect_response("**/events**"):
            page.goto(path.format(job=job))
        page.wait_for_load_state()
        page.clock.fast_forward(SILENT_MS // 2)
        expect(page.locator("#away")).to_be_empty()
        page.clock.fast_forward(SILENT_MS)
        expect(page.locator("#away")).to_contain_text("does not answer since")


@pytest.mark.parametrize("path", ["/", "/migrations/{job}"])
def test_a_service_with_no_news_is_there(browser: Browser, served: tuple[Service, str], path: str) -> None:
    service, address = served
    job = jobs.added(service, "here", (State.QUEUED, 5), (State.COPYING_FULL, 4))
    with opened(browser, address) as context:
        page = context.new_page()
        page.clock.install()
        with page.expect_response("**/events**"):
            page.goto(path.format(job=job))
        page.clock.fast_forward(SILENT_MS)
        # A beat, which comes three times a second here, takes the words away.
        expect(page.locator("#away")).to_be_empty()
