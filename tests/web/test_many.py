"""More than a thousand jobs in the list, and a service that is away, or is started again, under an open page."""

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from synvirt.model.job import Progress
from synvirt.model.kinds import State
from tests.fakes.service import QUICK, Service
from tests.running.ports import free_port
from tests.web import jobs
from tests.web.conftest import look_at, opened, serious, serving
from tests.web.test_waves import made

# Longer than a service may be silent.
SILENT_MS = 41_000


def names_on_all_pages(page: Page, rows: str, further: str) -> list[str]:
    """Each page has a hundred jobs at most, and leads to the next."""
    found = list[str]()
    while True:
        names = page.locator(f"{rows} li a").all_text_contents()
        assert len(names) <= 100
        found += names
        link = page.get_by_role("link", name=further)
        if not link.count():
            return found
        page.goto(str(link.get_attribute("href")))


def test_more_than_a_thousand_jobs(browser: Browser, served: tuple[Service, str]) -> None:
    service, address = served
    for number in range(150):
        jobs.added(service, f"waiting-{number}", (State.QUEUED, 9))
    running = [jobs.added(service, f"running-{n}", (State.QUEUED, 9), (State.COPYING_FULL, 8)) for n in range(300)]
    for number in range(700):
        jobs.added(service, f"ended-{number}", (State.QUEUED, 9), (State.COMPLETED, 8))
    for number in range(150):
        jobs.added(service, f"later-{number}", (State.QUEUED, 9))
    with opened(browser, address) as context:
        page = context.new_page()
        page.goto("/")
        expect(page.locator("#under-way > li")).to_have_count(200)
        # Those that have begun come first, and those that ended are there, however many wait.
        expect(page.locator("#under-way > li").first).to_contain_text("running-299")
        for job_id in running[200:]:
            service.board.pin(job_id, State.COPYING_FULL, Progress(bytes_total=100, bytes_done=42))
        for job_id in (running[200], running[299]):
            expect(page.locator(f"#figures-{job_id}")).to_contain_text("42 %")
        assert names_on_all_pages(page, "section[aria-labelledby=h-ended]", "Older") == [
            f"ended-{n}" for n in range(699, -1, -1)
        ]
        assert serious(page) == []
        page.goto("/")
        page.goto(str(page.get_by_role("link", name="More that have begun").get_attribute("href")))
        expect(page.locator(f"#job-{running[150]}")).to_have_count(1)
        service.board.pin(running[150], State.COPYING_FULL, Progress(bytes_total=100, bytes_done=43))
        expect(page.locator(f"#figures-{running[150]}")).to_contain_text("43 %")
        begun = names_on_all_pages(page, ".jobs", "More that have begun")
        assert begun == [f"running-{n}" for n in range(199, -1, -1)]
        page.goto("/")
        page.goto(str(page.get_by_role("link", name="More that wait").get_attribute("href")))
        waits = names_on_all_pages(page, ".jobs", "More that wait")
        assert waits == [f"later-{n}" for n in range(49, -1, -1)] + [f"waiting-{n}" for n in range(149, -1, -1)]
        assert serious(page) == []


@pytest.mark.timeout(180)
def test_a_page_finds_the_service_again_after_its_restart(browser: Browser, tmp_path: Path) -> None:
    before = Service(tmp_path, listen=f"127.0.0.1:{free_port()}")  # which it gets again
    here = jobs.added(before, "here", (State.QUEUED, 5), (State.COPYING_FULL, 4))
    with ExitStack() as stack:
        with serving(before) as address:
            context = opened(browser, address)
            page, other = context.new_page(), context.new_page()
            page.goto("/")
            other.goto(f"/migrations/{here}")
            expect(page.locator(f"#state-{here} .pill")).to_have_text("Copying")
        before.close()
        after = Service(tmp_path, listen=address.removeprefix("https://"))
        stack.callback(after.close)
        # What happens while no service runs is shown as well.
        after.move(here, State.STARTING)
        stack.enter_context(serving(after))
        expect(page.locator(f"#state-{here} .pill")).to_have_text("Starting", timeout=60_000)
        expect(other.locator(".stations .here b")).to_have_text("Starting", timeout=60_000)
        later = jobs.added(after, "later", (State.QUEUED, 0))
        expect(page.locator(f"#job-{later}")).to_have_count(1)
        after.move(here, State.COMPLETED)
        expect(page.locator(f"#state-{here} .pill")).to_have_text("Completed")
        expect(other.locator(".stations .end b")).to_have_text("Completed")
        context.close()


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
            expect(page.locator("#away")).to_contain_text("The service has not answered since")
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
        expect(page.locator("#away")).to_contain_text("has not answered since")


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
