"""The list and a job's page, in a real browser: what they show, live; by keyboard alone, on a phone, in the dark, and for
people who do not see them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from playwright.sync_api import Browser, Page, expect

from synvirt.jobs.instant import NO_SPACE, NO_SPACE_HINT
from synvirt.model.job import DiskProgress, Instant, Pass, Progress
from synvirt.model.kinds import State
from synvirt.model.values import now
from tests.fakes.service import PLAN, Service
from tests.web import jobs
from tests.web.conftest import look_at, opened, serious

GIB = 1 << 30


def test_a_job_that_begins_copies_and_ends_is_seen_without_a_reload(page: Page, service: Service) -> None:
    page.goto("/")
    expect(page.get_by_role("heading", level=1)).to_have_text("Migrations")
    page.wait_for_load_state("load")
    job = service.submit(PLAN.model_copy(update={"name": "born-live"}))
    mine = page.locator(f"#job-{job.id}")
    expect(mine).to_have_count(1)
    expect(mine.locator(".pill")).to_have_text("Queued")
    service.move(job.id, State.COPYING_FULL)
    expect(mine.locator(".pill")).to_have_text("Copying")
    figure = Progress(bytes_total=4 * GIB, bytes_done=GIB, rate_bps=512 << 20, eta_s=6)
    service.board.pin(job.id, State.COPYING_FULL, figure)
    expect(mine.locator(".figures")).to_contain_text("25 %")
    expect(mine.locator(".figures")).to_contain_text("512 MiB/s")
    expect(mine.locator(".figures")).to_contain_text("6 s left")
    service.board.unpin(job.id)
    service.move(job.id, State.COMPLETED)
    expect(mine.locator(".pill")).to_have_text("Completed")


def test_events_of_jobs_that_the_list_does_not_show_change_nothing_on_it(page: Page, service: Service) -> None:
    """The fixture of the page fails, if htmx complains in the console."""
    page.goto("/")
    page.wait_for_load_state("load")
    job = service.submit(PLAN.model_copy(update={"name": "not-shown"}))
    row = page.locator(f"#job-{job.id}")
    expect(row).to_have_count(1)
    page.evaluate("id => document.getElementById(id).remove()", f"job-{job.id}")
    service.move(job.id, State.COPYING_FULL)
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_total=4 * GIB, bytes_done=GIB))
    # All events that come before the row of a later job have been seen, when that is there.
    later = service.submit(PLAN.model_copy(update={"name": "shown"}))
    expect(page.locator(f"#job-{later.id}")).to_have_count(1)
    expect(row).to_have_count(0)
    service.board.unpin(job.id)
    for one in (job, later):
        service.move(one.id, State.COMPLETED)
    expect(page.locator(f"#state-{later.id} .pill")).to_have_text("Completed")


def test_a_job_that_was_removed_comes_to_no_new_page(page: Page, service: Service) -> None:
    """Not even while another page is open, for which the service still has the events of the job in memory."""
    page.goto("/")
    page.wait_for_load_state("load")
    job = service.submit(PLAN.model_copy(update={"name": "gone-soon"}))
    expect(page.locator(f"#job-{job.id}")).to_have_count(1)
    service.move(job.id, State.CANCELLED)
    expect(page.locator(f"#state-{job.id} .pill")).to_have_text("Cancelled")
    service.store.remove(job.id)
    another = page.context.new_page()
    another.goto("/")
    another.wait_for_load_state("load")
    later = service.submit(PLAN.model_copy(update={"name": "comes-next"}))
    expect(another.locator(f"#job-{later.id}")).to_have_count(1)
    expect(another.locator(f"#job-{job.id}")).to_have_count(0)
    service.move(later.id, State.COMPLETED)


def test_a_job_that_is_queued_twice_for_a_page_has_one_row(page: Page, service: Service) -> None:
    page.goto("/")
    page.wait_for_load_state("load")
    job = service.submit(PLAN.model_copy(update={"name": "once"}))
    expect(page.locator(f"#job-{job.id}")).to_have_count(1)
    service.move(job.id, State.QUEUED)
    service.move(job.id, State.STARTING)
    expect(page.locator(f"#state-{job.id} .pill")).to_have_text("Starting")
    expect(page.locator(f"#job-{job.id}")).to_have_count(1)
    service.move(job.id, State.COMPLETED)


def test_a_downgrade_has_a_colour_of_its_own_and_an_error_another(page: Page, service: Service) -> None:
    colours = {}
    for name, job_id in (("note", jobs.downgraded(service)), ("bad", jobs.unbooted(service))):
        page.goto(f"/migrations/{job_id}")
        banner = page.locator(f"#banner .banner.{name}")
        expect(banner).to_have_count(1)
        colours[name] = banner.evaluate("element => getComputedStyle(element).backgroundColor")
    assert len(set(colours.values())) == 2
    expect(page.locator("#banner")).to_contain_text("E_MIG_GUEST_BOOT_FAILED")
    expect(page.locator("#banner")).to_contain_text("look at its screen below")
    expect(page.locator("#boot")).to_contain_text("the firmware found nothing to boot")
    expect(page.locator("#conversion")).to_contain_text("no virtio-scsi driver")


def test_the_page_of_a_paused_guest_does_not_contradict_its_cause(page: Page, service: Service) -> None:
    """It is paused where its source is away, and where what it writes has no room: the cause is shown beside it."""
    cause = jobs.problem("E_MIG_DISK_WRITE_FAILED", NO_SPACE, NO_SPACE_HINT, fatal=False, state=State.COPYING_FULL)
    instant = Instant(state="waiting", started_at=now())
    job_id = jobs.added(service, "erp", (State.QUEUED, 60), (State.COPYING_FULL, 50), instant=instant, last_error=cause)
    page.goto(f"/migrations/{job_id}")
    expect(page.locator("#banner .hint")).to_have_text(NO_SPACE_HINT)
    expect(page.locator("#banner")).to_contain_text("it cannot read what it runs from, or has no room for what it writes")


def test_the_screen_of_a_guest_that_did_not_boot_is_shown_where_there_is_one(page: Page, service: Service) -> None:
    job_id = jobs.unbooted(service)
    page.goto(f"/migrations/{job_id}")
    expect(page.locator("#boot img")).to_have_count(0)
    service.screenshots[job_id] = page.screenshot()
    page.reload()
    expect(page.locator("#boot img")).to_have_js_property("naturalWidth", 1280)


def test_the_lines_of_a_guests_console_stay_lines_and_holes_are_no_part_of_what_was_read(page: Page, service: Service) -> None:
    message = "the guest did nothing; its console ends:\nBooting from Hard Disk...\nNo bootable device."
    job_id = jobs.added(
        service,
        "console",
        (State.QUEUED, 9),
        (State.COPYING_FULL, 8),
        (State.STARTING, 5),
        (State.FAILED, 1),
        last_error=jobs.NO_BOOT.model_copy(update={"message": message}),
        disks=(DiskProgress(key="disk0", label="disk0", state="copied", bytes_zero=GIB, volume="web.raw"),),
    )
    page.goto(f"/migrations/{job_id}")
    assert message in page.locator("#banner").inner_text()
    expect(page.locator("#disks .cards")).to_contain_text("0 B of 0 B, 1.0 GiB zeros")
    page.goto(f"/migrations/{job_id}/remove")
    expect(page.locator(".lead")).to_have_text("console has failed.")


@pytest.mark.parametrize(("state", "words"), [(State.COPYING_FULL, "copying"), (State.CANCELLED, "stopped")])
def test_of_a_job_that_has_ended_no_disk_is_being_copied(page: Page, service: Service, state: State, words: str) -> None:
    disk = DiskProgress(key="disk0", label="system", state="copying", bytes_total=2 * GIB, bytes_done=GIB)
    job_id = jobs.added(service, "halfway", (State.QUEUED, 9), (state, 1), disks=(disk,))
    page.goto(f"/migrations/{job_id}")
    expect(page.locator("#disks .pill")).to_have_text(words)
    if state == State.COPYING_FULL:
        service.move(job_id, State.CANCELLED)
        expect(page.locator("#disks .pill")).to_have_text("stopped")


def test_a_jobs_page_follows_it(page: Page, service: Service) -> None:
    job_id = jobs.added(service, "followed", (State.QUEUED, 5), (State.COPYING_FULL, 4), manifest=jobs.LINUX)
    page.goto(f"/migrations/{job_id}")
    stations = page.locator(".stations b")
    expect(stations).to_have_text(["Queued", "Copying", "Starting", "Completed"])
    expect(page.locator(".stations .here b")).to_have_text("Copying")
    service.board.pin(job_id, State.COPYING_FULL, Progress(bytes_total=8 * GIB, bytes_done=4 * GIB, rate_bps=1 << 30, eta_s=4))
    expect(page.locator("#figures")).to_contain_text("50 %")
    expect(page.locator("#figures")).to_contain_text("1.0 GiB/s")
    service.board.unpin(job_id)
    service.move(job_id, State.STARTING)
    expect(page.locator(".stations .here b")).to_have_text("Starting")
    service.move(job_id, State.FAILED, error=jobs.NO_BOOT)
    expect(page.locator(".stations .end b")).to_have_text("Failed")
    expect(stations).to_have_text(["Queued", "Copying", "Starting", "Failed"])
    expect(page.locator("#banner")).to_contain_text("no sign of life in 600 s")


def test_cancelling_is_confirmed_and_works_by_keyboard_alone(page: Page, service: Service) -> None:
    job_id = jobs.added(service, "by-keyboard", (State.QUEUED, 5), (State.COPYING_FULL, 4))
    page.goto("/")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    press_until(page, f"#job-{job_id} a")
    page.keyboard.press("Enter")
    expect(page).to_have_title("by-keyboard · SynVirt")
    press_until(page, "#ask-cancel")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Cancel this migration?")
    assert not service.store.cancel_requested(job_id)
    press_until(page, "button.danger")
    page.keyboard.press("Enter")
    expect(page.locator("#banner")).to_contain_text("It is being cancelled")
    expect(page.locator("#ask-cancel")).to_have_count(0)
    assert service.store.cancel_requested(job_id)
    assert service.woken[-1] == job_id


def press_until(page: Page, selector: str) -> None:
    """Tab, until it has the focus: some people have only the keyboard."""
    for _ in range(200):
        if page.locator(f"{selector}:focus").count():
            return
        page.keyboard.press("Tab")
    pytest.fail(f"{selector} cannot be reached with the Tab key")


def test_a_warm_job_is_cut_over_from_its_page(page: Page, service: Service) -> None:
    job_id = jobs.warm(service, "cut-me-over")
    page.goto(f"/migrations/{job_id}")
    expect(page.locator(".stations .ahead b")).to_have_text(["Cutting over", "Preparing guest", "Starting", "Completed"])
    expect(page.locator("#passes tbody tr")).to_have_count(3)
    expect(page.locator("#figures")).to_contain_text("Expected downtime")
    expect(page.locator("#banner")).to_contain_text("It is held for its cut-over")
    page.click("#ask-cutover")
    page.click("main button[type=submit]")
    expect(page.locator("#banner")).to_contain_text("It was asked to cut over: it does once its present pass has ended")
    expect(page.locator("#banner")).not_to_contain_text("you cut over")
    assert service.store.cutover_requested(job_id)


def test_of_a_job_that_is_held_for_a_week_the_last_passes_are_shown(page: Page, service: Service) -> None:
    job_id = jobs.warm(service, "held-for-a-week")
    passes = tuple(Pass(number=number, kind="delta", bytes=1, seconds=1, finished_at=now()) for number in range(1, 2001))
    service.store.change(job_id, State.DELTA_SYNCING, lambda job: job.model_copy(update={"passes": passes}))
    page.goto(f"/migrations/{job_id}")
    shown = page.locator("#passes tbody th")
    expect(shown).to_have_text(["1", "…", *map(str, range(1981, 2001))])
    expect(page.locator("#passes")).to_contain_text("1979 more")


def test_a_failed_job_goes_on_with_its_copy_or_runs_again(page: Page, service: Service) -> None:
    page.goto(f"/migrations/{jobs.unbooted(service)}")
    page.click("#ask-retry")
    page.click("main button[type=submit]")
    expect(page.locator("#banner")).to_contain_text("Goes on with the copy of")
    expect(page.locator(".stations .here b")).to_have_text("Queued")
    half = jobs.added(service, "half", (State.QUEUED, 5), (State.CANCELLED, 4))
    page.goto(f"/migrations/{half}")
    expect(page.locator("#ask-retry")).to_have_count(0)
    page.click("#ask-again")
    page.click("main button[type=submit]")
    expect(page.locator(".stations .here b")).to_have_text("Queued")
    assert str(half) not in page.url


# Presses the button of a form three times. Each time: was it held back? None of them is sent.
PRESSED = """button => {
    const held = [];
    document.addEventListener('submit', event => { held.push(event.defaultPrevented); event.preventDefault(); });
    for (let time = 0; time < 3; time += 1) button.click();
    return held;
}"""


def test_a_form_is_sent_once_however_often_its_button_is_pressed(page: Page, service: Service) -> None:
    half = jobs.added(service, "pressed-twice", (State.QUEUED, 5), (State.CANCELLED, 4))
    for path in (f"/migrations/{half}/again", "/backups/repositories/new", "/doctor"):
        page.goto(path)
        button = page.locator("main form button[type=submit]").first
        page.evaluate("document.querySelector('main form').noValidate = true")
        assert button.evaluate(PRESSED) == [False, True, True], path
        expect(button).to_have_attribute("aria-busy", "true")


# Sends a form, and stops the next page, which does not come. How the button was: sent, and after that.
STOPPED = """async stop => {
    const button = document.querySelector('main form button[type=submit]');
    document.querySelector('main form').action = '/never';
    button.click();
    const busy = [button.getAttribute('aria-busy')];
    await new Promise(done => setTimeout(done, 100));
    if (stop === 'Escape') document.dispatchEvent(new KeyboardEvent('keydown', { key: stop, bubbles: true }));
    else window.stop();
    for (let look = 0; look < 100 && button.hasAttribute('aria-busy'); look += 1) {
        await new Promise(done => setTimeout(done, 100));
    }
    return [...busy, button.getAttribute('aria-busy')];
}"""


@pytest.mark.parametrize("stop", ["Escape", "button"])
def test_a_form_whose_next_page_was_stopped_may_be_sent_again(page: Page, service: Service, stop: str) -> None:
    page.route("**/never", lambda route: None)
    page.goto(f"/migrations/{jobs.added(service, 'stopped', (State.QUEUED, 5), (State.CANCELLED, 4))}/again")
    assert page.evaluate(STOPPED, stop) == ["true", None]


def test_what_cannot_be_done_says_why_as_a_page(page: Page, service: Service) -> None:
    ended = jobs.completed(service, "long-ended")
    page.goto(f"/migrations/{ended}/cancel")
    page.click("main button[type=submit]")
    expect(page.locator(".banner.bad")).to_contain_text("E_MIG_CONFLICT")
    answer = page.goto("/migrations/00000000-0000-0000-0000-000000000000")
    assert answer is not None
    assert answer.status == 404
    expect(page.locator(".banner.bad")).to_contain_text("there is no migration")


@pytest.mark.parametrize(("ttl_s", "is_lost"), [(-5, True), (600, False)])
def test_the_page_of_a_job_whose_host_is_lost_says_so_and_goes_on_elsewhere(
    page: Page, service: Service, *, ttl_s: float, is_lost: bool
) -> None:
    """Its last figures are of the moment before: nothing is copied any more."""
    service.store.hosts.begin("kvm2", ttl_s=ttl_s, document="{}")
    progress = Progress(bytes_total=100 << 20, bytes_done=50 << 20, rate_bps=5 << 20, eta_s=10)
    job = jobs.added(service, "of-kvm2", (State.COPYING_FULL, 20), host="kvm2", progress=progress)
    page.goto(f"/migrations/{job}")
    expect(page.locator("#facts")).to_contain_text("kvm2")
    expect(page.locator("#figures")).to_contain_text("50.0 MiB")
    expect(page.get_by_text("5.0 MiB/s")).to_have_count(0 if is_lost else 1)
    expect(page.locator("#ask-fence")).to_have_count(1 if is_lost else 0)
    if not is_lost:
        assert page.request.post(f"/migrations/{job}/fence", headers={"Sec-Fetch-Site": "same-origin"}).status == 409
        return
    expect(page.locator("#banner")).to_contain_text("Its host kvm2 has not been heard of for a minute")
    page.locator("#ask-fence").click()
    page.get_by_role("button", name="Yes: fence its host").click()
    expect(page.locator("#banner")).to_contain_text("Its host kvm2 is fenced")
    expect(page.locator("#ask-start-over")).to_have_count(1)
    page.locator("#ask-take-over").click()
    page.get_by_role("button", name="Yes: go on here").click()
    expect(page.locator("main")).to_contain_text("it shares its store with no other host")


@pytest.mark.parametrize("field", ["retry_of", "retried_by", "restart_of", "restarted_by"])
def test_the_page_of_a_job_leads_to_those_before_and_after_it(page: Page, service: Service, field: str) -> None:
    other = jobs.added(service, "the other", (State.QUEUED, 5), (State.FAILED, 4))
    one = jobs.added(service, "the one", (State.QUEUED, 3), (State.FAILED, 2), plan=PLAN, **{field: other})
    page.goto(f"/migrations/{one}")
    page.locator(f"#banner a[href='/migrations/{other}']").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("the other")


def test_a_job_whose_removal_was_interrupted_does_not_lead_to_itself(page: Page, service: Service) -> None:
    job_id = jobs.added(service, "half-gone", (State.QUEUED, 3), (State.FAILED, 2))
    service.store.change(job_id, State.FAILED, lambda job: job.model_copy(update={"retried_by": job.id}))
    page.goto(f"/migrations/{job_id}")
    expect(page.locator("#banner")).to_contain_text("if that was interrupted, remove it again")
    expect(page.locator("#banner a")).to_have_count(0)
    page.get_by_role("link", name="Remove from the list").click()
    page.get_by_role("button").last.click()
    expect(page).to_have_title("Migrations · SynVirt")


@pytest.mark.parametrize(
    "name", ["  ", "\N{ZERO WIDTH SPACE}", "\N{NO-BREAK SPACE}\N{RIGHT-TO-LEFT OVERRIDE}", "\N{HANGUL FILLER}"]
)
def test_a_job_with_a_name_that_cannot_be_seen_can_be_opened(page: Page, service: Service, name: str) -> None:
    job_id = jobs.added(service, name, (State.QUEUED, 5), (State.COPYING_FULL, 4))
    page.goto("/")
    page.locator(f"#job-{job_id}").get_by_role("link", name="(a name that cannot be seen)").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("(a name that cannot be seen)")
    assert serious(page) == []


@pytest.mark.parametrize("path", ["", "/cancel", "/remove"])
def test_a_long_name_without_a_space_is_broken_and_the_page_stays_as_wide_as_the_window(
    page: Page, service: Service, path: str
) -> None:
    ended = (State.COPYING_FULL, 4), (State.CANCELLED, 3)
    job_id = jobs.added(service, "W" * 255, (State.QUEUED, 5), *(ended if path == "/remove" else ended[:1]))
    page.goto(f"/migrations/{job_id}{path}")
    expect(page.locator("main")).to_contain_text("W" * 255)
    look_at(page, f"long-name{path.replace('/', '-')}")


def test_a_name_from_a_hostile_archive_stays_a_name(page: Page, service: Service) -> None:
    name = "<img src=x onerror=alert(1)><script>document.title='owned'</script>"
    job_id = jobs.added(service, name, (State.QUEUED, 5), (State.COPYING_FULL, 4))
    page.goto("/")
    expect(page.locator(f"#job-{job_id} a")).to_have_text(name)
    page.goto(f"/migrations/{job_id}")
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    assert page.title() == f"{name} · SynVirt"


# Does the text after an element stand to the right of it?
FOLLOWS = """element => {
    const range = document.createRange();
    range.selectNodeContents(element.nextSibling);
    return range.getBoundingClientRect().left >= element.getBoundingClientRect().right - 1;
}"""


def test_a_name_that_turns_the_direction_of_text_turns_only_its_own(page: Page, service: Service) -> None:
    job_id = jobs.added(service, "\u202exe.gpj", (State.QUEUED, 5), (State.COPYING_FULL, 4))
    page.goto(f"/migrations/{job_id}/cancel")
    assert page.locator("main .lead b").evaluate(FOLLOWS)


def test_another_sites_form_does_nothing(page: Page, service: Service) -> None:
    """The browser is logged in by then, and keeps that to itself (SameSite)."""
    job_id = jobs.added(service, "coveted", (State.QUEUED, 5), (State.COPYING_FULL, 4))
    page.goto(f"/migrations/{job_id}")
    origin = page.url.split("/migrations")[0]
    for path in (f"/migrations/{job_id}/cancel", f"/api/v1/migrator/migrations/{job_id}/cancel"):
        with stranger(f"<form method=post action='{origin}{path}'><button>Win a prize</button></form>") as address:
            page.goto(address)
            with page.expect_response(origin + path) as answer:
                page.click("button")
            assert answer.value.status == 401
    assert not service.store.cancel_requested(job_id)


@contextmanager
def stranger(html: str) -> Iterator[str]:
    """Another site, with this one page."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(html.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://localhost:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def shown(service: Service) -> dict[str, str]:
    """A job of each look."""
    looks = {"warm": jobs.warm(service), "downgraded": jobs.downgraded(service), "unbooted": jobs.unbooted(service)}
    return {"list": "/"} | {
        name: f"/migrations/{id_}" for name, id_ in (looks | {"completed": jobs.completed(service)}).items()
    }


@pytest.mark.timeout(180)
def test_it_can_be_read_by_everybody(page: Page, shown: dict[str, str]) -> None:
    for name, path in (shown | {"confirm": f"{shown['warm']}/cancel"}).items():
        page.goto(path)
        look_at(page, name)


def test_it_is_read_without_javascript(browser: Browser, served: tuple[Service, str]) -> None:
    job_id = jobs.warm(served[0], "no-script")
    with opened(browser, served[1], java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/")
        page.click(f"#job-{job_id} a")
        expect(page.locator("#figures")).to_contain_text("63 %")
        page.click("#ask-cancel")
        page.click("button.danger")
        expect(page.locator("#banner")).to_contain_text("It is being cancelled")
    assert served[0].store.cancel_requested(job_id)
