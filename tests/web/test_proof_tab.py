"""The proof of a job on its page, in a real browser: its outage, what was verified, its receipt, rehearsals and forecast."""

import re
import tarfile
from typing import Any
from uuid import uuid4

import pytest
from playwright.sync_api import Page, expect

from synvirt.model.job import Migration, OutageForecast
from synvirt.model.kinds import State
from synvirt.model.rehearsal import CheckResult, RehearsalState, Sameness
from synvirt.model.repair import DiskRepair, Repair, Span
from synvirt.model.values import now
from tests.fakes.service import Service
from tests.web import jobs
from tests.web.conftest import look_at

GIB = 1 << 30


def test_a_jobs_proof_has_a_tab_with_its_outage_its_verification_and_its_receipt(page: Page, service: Service) -> None:
    page.goto(f"/migrations/{jobs.moved(service)}")
    expect(page.locator("#outage")).to_be_hidden()
    page.click("#tab-proof")
    expect(page.locator("#figures")).to_be_hidden()
    outage = page.locator("#outage")
    for words in ("1 min 35 s", "4 min 56 s with 95 % certainty", "1 min 22 s", "kept", "13 s less than forecast"):
        expect(outage).to_contain_text(words)
    expect(outage.locator("tbody tr").nth(2)).to_contain_text("never: an estimate")
    expect(page.locator("#so-far dd")).to_have_text(["1 of 1, of the newest here", "13 s"])
    expect(page.locator("#verification tbody td")).to_have_text(
        ["80.0 MiB", "a loss of 1.2 % of these blocks or more, with 95 % certainty"]
    )
    moved = page.locator("#moved")
    expect(moved).to_contain_text("41 facts are the same, 2 differ")
    expect(moved.locator("tbody tr").first).to_contain_text("service <nginx>")
    expect(moved.locator(".pill")).to_have_text(["wrong", "look"])
    receipt = page.locator("#receipt")
    expect(receipt.locator("tbody th")).to_have_text("Hard disk 1 <b>")
    expect(receipt.locator("tbody")).to_contain_text("not all of it was read by the copy")
    expect(receipt.locator(".facts")).to_contain_text("Time stamp")
    page.click("#receipt summary")
    expect(receipt.locator("details pre")).to_contain_text('"measured_s": 82.4')
    with page.expect_download() as download:
        page.click("#download-receipt")
    with tarfile.open(download.value.path()) as tar:
        assert any(name.endswith("/data/statement.json") for name in tar.getnames())
    look_at(page, "proof")


def test_a_source_that_lost_changes_is_named_with_them(page: Page, service: Service) -> None:
    job_id = jobs.moved(service)
    lost = "the source called 4096 bytes at offset 5242880 unchanged, and they have changed"
    service.store.change(job_id, State.COMPLETED, lambda job: job.model_copy(update={"distrusted": lost}))
    page.goto(f"/migrations/{job_id}/proof")
    expect(page.locator("#verification .bad")).to_have_text(f"The source was found to lose changes: {lost}.")


def test_a_guest_that_was_started_is_compared_with_its_receipt_and_one_that_was_not_is_repaired(
    page: Page, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def repair_of(job: Migration, check_only: bool) -> Repair:
        return Repair(of=job.id, check_only=check_only, disks=(DiskRepair(key="2000", volume="erp <1>.raw"),))

    def repairs() -> list[Migration]:
        return [job for job in service.store.unended() if job.repair is not None]

    monkeypatch.setattr(service.intake, "_repair", repair_of)
    job_id = jobs.moved(service)
    page.goto(f"/migrations/{job_id}/proof")
    expect(page.locator("#ask-repair")).to_have_count(0)
    page.click("#ask-check")
    expect(page.get_by_role("heading", level=1)).to_have_text("Compare its volumes with the receipt?")
    page.click("#content form button")
    (checking,) = repairs()
    expect(page).to_have_url(re.compile(f"/migrations/{checking.id}$"))
    expect(page.locator("#banner a")).to_have_attribute("href", re.compile(f"/migrations/{job_id}/proof$"))
    service.move(checking.id, State.COPYING_FULL)
    expect(page.locator("#way [aria-current]")).to_contain_text("Comparing")
    expect(page.locator("#way li")).to_have_count(3)
    differs = DiskRepair(key="2000", volume="erp <1>.raw", differs=(Span(start=8 << 20, length=4 << 20),))
    assert checking.repair is not None
    found = checking.repair.model_copy(update={"disks": (differs,)})
    service.store.change(checking.id, State.COPYING_FULL, lambda job: job.model_copy(update={"repair": found}))
    service.move(checking.id, State.COMPLETED)
    expect(page.locator("#found tbody th")).to_have_text("8388608")
    expect(page.locator("#found .pill")).to_have_text("differs")
    look_at(page, "found")

    def never_started(job: Migration) -> Migration:
        target = job.plan.target.model_copy(update={"start": False})
        return job.model_copy(update={"plan": job.plan.model_copy(update={"target": target}), "boot_attempts": ()})

    service.store.change(job_id, State.COMPLETED, never_started)
    page.goto(f"/migrations/{job_id}/proof")
    page.click("#ask-repair")
    page.click("#content form button.danger")
    expect(page.locator("#banner")).to_contain_text("Compares and repairs the volumes")
    (repairing,) = repairs()
    assert repairing.repair is not None
    assert not repairing.repair.check_only


def test_a_job_that_was_removed_is_not_linked(page: Page, service: Service) -> None:
    """Before, its link was answered with 404: a repair's, once the job that it repaired was removed, and all others."""
    removed, there = uuid4(), jobs.completed(service)
    others: dict[str, Any] = {"retried_by": removed, "retry_of": removed, "restarted_by": removed, "restart_of": there}
    of = Repair(of=removed, check_only=True, disks=(DiskRepair(key="2000", volume="erp.raw"),))
    job_id = jobs.added(service, "erp", (State.QUEUED, 9), (State.COMPLETED, 1), repair=of, **others)
    page.goto(f"/migrations/{job_id}")
    banner = page.locator("#banner")
    expect(banner).to_contain_text("Compares the volumes of another job, which was removed, by its receipt.")
    expect(banner).to_contain_text("Taken up by another job, which was removed.")
    expect(banner.locator("a")).to_have_count(1)
    expect(banner.locator("a")).to_have_attribute("href", re.compile(f"/migrations/{there}$"))


def test_a_job_is_rehearsed_and_its_proof_says_what_came_of_it(page: Page, service: Service) -> None:
    job_id = jobs.warm(service, "rehearsed")
    page.goto(f"/migrations/{job_id}")
    page.click("#ask-rehearse")
    expect(page.get_by_role("heading", level=1)).to_have_text("Rehearse this move?")
    page.click("#content form button")
    expect(page).to_have_url(re.compile(f"/migrations/{job_id}/proof$"))
    rehearsals = page.locator("#rehearsals")
    expect(rehearsals).to_contain_text("Waiting for the end of a pass")
    expect(page.locator("#ask-rehearse")).to_have_count(0)
    (found,) = service.store.rehearsals.of(job_id)
    service.screenshots[found.id] = page.screenshot()
    done = {
        "state": RehearsalState.FAILED,
        "moment": now(),
        "conversion_s": 61.0,
        "boot_s": 34.0,
        "outage_s": 131.0,
        "checks": (
            CheckResult(name="boot", ok=True, detail="seen by its agent, disks on virtio"),
            CheckResult(name="systemctl is-active <nginx>", ok=False, detail="systemctl ended with 3"),
        ),
        "sameness": (
            Sameness(
                item="host name", source="erp", clone="<localhost>", grade="wrong", reason="it should have moved as it is"
            ),
            Sameness(item="kernel", source="6.1", clone="6.1", grade="same"),
        ),
        "screenshot_url": f"/migrations/{job_id}/rehearsals/{found.id}/screenshot",
    }
    service.store.rehearsals.change(found.id, found.state, lambda one: one.model_copy(update=done))
    expect(rehearsals).to_contain_text("systemctl is-active <nginx>")
    expect(rehearsals.locator("summary")).to_have_text("Against its source: 1 of 2 facts differ")
    expect(rehearsals.locator("tbody td")).to_contain_text(["erp", "<localhost>", "it should have moved as it is"])
    expect(rehearsals.locator(".pill")).to_have_text(["Failed", "wrong"])
    expect(rehearsals.locator("li.bad")).to_have_count(1)
    expect(rehearsals).to_contain_text("2 min 11 s")
    expect(rehearsals.locator("img")).to_have_js_property("naturalWidth", 1280)
    look_at(page, "rehearsed")


def test_the_forecast_of_a_job_that_is_held_is_followed_on_its_proof(page: Page, service: Service) -> None:
    job_id = jobs.warm(service, "followed-proof")
    page.goto(f"/migrations/{job_id}/proof")
    expect(page.locator("#outage")).to_contain_text("The forecast comes with the end of the first pass")
    forecast = OutageForecast(p50_s=40, p95_s=90, budget_s=60, at=now())
    service.store.change(job_id, State.DELTA_SYNCING, lambda job: job.model_copy(update={"outage": forecast}))
    expect(page.locator("#outage")).to_contain_text("it may take longer")
    expect(page.locator("#receipt")).to_contain_text("made and signed when the job completes")
