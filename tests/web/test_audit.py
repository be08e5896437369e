"""The page of the audit trail: who did what, and whether all of it is still there."""

from typing import Any
from uuid import uuid4

from playwright.sync_api import Page, expect
from sqlalchemy import update

from synvirt.model.values import now
from synvirt.store.access import AuditEntry
from synvirt.store.tables import audit
from tests.fakes.service import PLAN, PREFIX, USER, Service
from tests.web.conftest import look_at


def test_who_did_what_is_seen_and_verified(page: Page, service: Service) -> None:
    sent = page.request.post(f"{PREFIX}/migrations", data={"plan": PLAN.model_dump(mode="json", exclude_none=True)})
    assert sent.status == 201
    page.goto("/")
    page.get_by_role("link", name="Audit").click()
    newest = page.locator("tbody tr").first
    expect(newest).to_contain_text(f"POST {PREFIX}/migrations")
    expect(newest).to_contain_text(USER)
    expect(newest).to_contain_text("plan ")
    look_at(page, "audit")
    # On the phone that was looked at last the table is moved sideways: no time is broken into five lines.
    assert newest.locator("time").evaluate("element => element.getClientRects().length") == 1
    page.get_by_role("button", name="Verify").click()
    expect(page.get_by_role("status")).to_contain_text("are as they were written")
    with service.store._engine.begin() as db:
        kept = db.execute(audit.select().order_by(audit.c.seq).limit(1)).one()
        db.execute(update(audit).where(audit.c.seq == kept.seq).values(document=kept.document.replace(USER, "mallory")))
    page.get_by_role("button", name="Verify").click()
    expect(page.get_by_role("status")).to_contain_text(f"Entry {kept.seq} was changed")
    with page.expect_download() as downloading:
        page.get_by_role("link", name="Export").click()
    assert downloading.value.path().read_text().count("\n") >= 1
    page.goto(f"/migrations/{sent.json()['id']}")
    expect(page.locator("#facts")).to_contain_text(f"by {USER}")


def test_an_address_has_room_on_a_phone(page: Page, service: Service) -> None:
    entry: dict[str, Any] = {"account": USER, "role": "admin", "address": "127.0.0.1", "method": "POST", "result": 200}
    service.store.audit.add(AuditEntry(at=now(), resource=f"/sources/{uuid4()}/test", **entry))
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto("/audit")
    # Rows of other tests may have words that take more room.
    page.evaluate("document.querySelectorAll('tbody tr:not(:first-child)').forEach(row => row.remove())")
    address = page.locator("tbody tr").first.locator("td").nth(3)
    expect(address).to_contain_text("/sources/")
    assert address.evaluate("element => element.clientWidth") >= 170
