"""The pages of windows: made, seen, changed, removed, and chosen on the form of a migration."""

from datetime import datetime, timedelta

from playwright.sync_api import Page, expect

from synvirt.model.kinds import State
from synvirt.model.values import now
from synvirt.model.windows import Window
from tests.fakes.service import Service
from tests.web import jobs
from tests.web.conftest import look_at

LOCKED = "2026-12-24T00:00:00 2026-12-27T00:00:00"


def local(**later: float) -> datetime:
    return now().replace(tzinfo=None, microsecond=0) + timedelta(**later)


def test_a_window_is_made_seen_changed_and_removed(page: Page, service: Service) -> None:
    for window in service.store.windows.all():
        service.store.windows.remove(window.id)
    page.goto("/windows")
    expect(page.locator(".nothing")).to_contain_text("There are no windows yet")
    page.click("text=Add a window")
    fields = {
        "id": "nights",
        "name": "Saturday <nights>",
        "timezone": "Europe/Berlin",
        "rrule": "FREQ=WEEKLY;BYDAY=SA",
        "start": "2026-11-28T22:00:00",
        "end": "2026-11-29T04:00:00",
        "lockouts": f"{LOCKED}\n\n2027-01-01T00:00:00 2027-01-02T00:00:00\n",
    }
    for field, text in fields.items():
        page.fill(f"#field-{field}", text)
    look_at(page, "window-new")
    page.click(".form button")
    row = page.locator("#window-nights")
    expect(row).to_contain_text("Saturday <nights>")
    expect(row).to_contain_text("2026-11-28 22:00:00 to 2026-11-29 04:00:00, Europe/Berlin · again by FREQ=WEEKLY;BYDAY=SA")
    expect(row).to_contain_text("2 lock-outs")
    service.store.windows.add(Window(id="a-day", name="A day", start=local(hours=-1), end=local(hours=5)))
    service.store.windows.add(Window(id="over", name="Over", start=local(days=-9), end=local(days=-8)))
    page.reload()
    expect(page.locator("#window-a-day .pill")).to_have_text("Open")
    expect(page.locator("#window-over .pill")).to_have_text("Over")
    look_at(page, "windows")
    made = service.store.windows.get("nights")
    assert made.lockouts[0].end.isoformat() == LOCKED.split()[1]
    row.get_by_role("link", name="Saturday").first.click()
    expect(page.locator("#field-lockouts")).to_have_value(f"{LOCKED}\n2027-01-01T00:00:00 2027-01-02T00:00:00")
    page.fill("#field-name", "Nights")
    page.fill("#field-lockouts", LOCKED)
    page.click(".form button")
    expect(row).to_contain_text("1 lock-out")
    changed = service.store.windows.get("nights")
    assert changed == made.model_copy(update={"name": "Nights", "lockouts": made.lockouts[:1]})
    row.get_by_role("link", name="Remove").click()
    page.click("button.danger")
    expect(page.locator("#window-a-day")).to_be_visible()
    assert [one.id for one in service.store.windows.all()] == ["a-day", "over"]


def test_a_window_that_somebody_else_changes_meanwhile_is_not_lost(page: Page, service: Service) -> None:
    made = Window(id="both", name="Both", start=local(hours=-1), end=local(hours=5))
    service.store.windows.add(made)
    page.goto("/windows/both/change")
    page.fill("#field-rrule", "FREQ=DAILY")
    theirs = made.model_copy(update={"end": local(hours=4)})
    service.store.windows.change("both", lambda _: theirs)
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text(
        f"changed since this form was opened; now there is Opens again by (RFC 5545): (empty); Closes: {theirs.end.isoformat()}"
    )
    assert service.store.windows.get("both") == theirs
    page.click(".form button")
    expect(page.locator("#window-both")).to_contain_text("FREQ=DAILY")
    assert service.store.windows.get("both") == made.model_copy(update={"rrule": "FREQ=DAILY"})


def test_what_is_wrong_with_a_window_is_shown_beside_it(page: Page, service: Service) -> None:
    page.goto("/windows/new")
    typed = {"id": "n ights", "name": "Nights", "timezone": "Mars/Olympus", "start": "tonight", "end": "2026-11-28T22:00:00Z"}
    for field, text in (typed | {"lockouts": LOCKED}).items():
        page.fill(f"#field-{field}", text)
    page.click(".form button")
    for field, words in (("id", "letters, digits"), ("timezone", "IANA"), ("start", "is not a date"), ("end", "no offset")):
        expect(page.locator(f"#field-{field}-mistake")).to_contain_text(words)
        expect(page.locator(f"#field-{field}")).to_have_value(typed[field])
    corrected = {"id": "nights", "timezone": "", "start": "2026-11-28T22:00:00", "end": "2026-11-29T04:00:00"}
    for field, text in (corrected | {"lockouts": "2026-12-27T00:00:00 2026-12-24T00:00:00"}).items():
        page.fill(f"#field-{field}", text)
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("a lock-out ends after it starts")
    expect(page.locator("#field-lockouts-mistake")).to_contain_text("the later one last")
    page.fill("#field-lockouts", "2026-12-27T00:00:00")
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("2026-12-27T00:00:00: needs two times")
    page.fill("#field-lockouts", "")
    page.fill("#field-rrule", "FREQ=SOMETIMES")
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("FREQ")
    assert "nights" not in {one.id for one in service.store.windows.all()}
    page.fill("#field-rrule", "")
    page.click(".form button")
    expect(page.locator("#window-nights")).to_be_visible()
    assert service.store.windows.get("nights").timezone == "UTC"
    page.goto("/windows/new")
    for field, text in {**corrected, "name": "Again"}.items():
        page.fill(f"#field-{field}", text)
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("there is a window nights already")


def test_a_window_that_a_job_waits_for_stays(page: Page, service: Service) -> None:
    service.store.windows.add(Window(id="later", name="Later", start=local(days=1), end=local(days=2)))
    warm = jobs.WARM_PLAN.warm.model_copy(update={"window_id": "later"})
    plan = jobs.WARM_PLAN.model_copy(update={"warm": warm})
    jobs.added(service, "waits", (State.QUEUED, 100), (State.DELTA_SYNCING, 10), plan=plan)
    page.goto("/windows/later/remove")
    page.click("button.danger")
    expect(page.locator("main")).to_contain_text("is needed by 1 job: waits")
    assert service.store.windows.get("later").name == "Later"
