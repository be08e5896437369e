"""A thousand jobs in the list, and a service that is started again under an open page."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from synvirt.model.job import Progress
from synvirt.model.kinds import State
from tests.fakes.service import Service
from tests.running.ports import free_port
from tests.web import jobs
from tests.web.conftest import opened, serious, serving


def test_a_thousand_jobs(browser: Browser, served: tuple[Service, str]) -> None:
    service, address = served
    running = [jobs.added(service, f"running-{n}", (State.QUEUED, 9), (State.COPYING_FULL, 8)) for n in range(300)]
    ended = [jobs.added(service, f"ended-{n}", (State.QUEUED, 9), (State.COMPLETED, 8)) for n in range(700)]
    with opened(browser, address) as context:
        page = context.new_page()
        page.goto("/")
        expect(page.locator("#under-way > li")).to_have_count(300)
        for job_id in running[:100]:
            service.board.pin(job_id, State.COPYING_FULL, Progress(bytes_total=100, bytes_done=42))
        for job_id in (running[0], running[99]):
            expect(page.locator(f"#figures-{job_id}")).to_contain_text("42 %")
        seen = set()
        while True:
            names = page.locator("section[aria-labelledby=h-ended] li a").all_text_contents()
            seen |= set(names)
            assert len(names) <= 100
            older = page.get_by_role("link", name="Older")
            if not older.count():
                break
            older.click()
            page.wait_for_load_state("load")
        assert seen == {f"ended-{n}" for n in range(len(ended))}
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
