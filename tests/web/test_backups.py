"""The pages of backups: a repository, a job, its runs, and what becomes of its restore points; real backups of files."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from synvirt.backups.model import (
    BackupJob,
    BackupJobChange,
    BackupJobRequest,
    BackupRepository,
    BackupRepositoryRequest,
    RestorePoint,
)
from synvirt.backups.retention import Retention
from tests.drawn import drawn
from tests.fakes.backups import ended
from tests.fakes.service import Service
from tests.web.conftest import look_at, opened, serving
from tests.web.test_pages import press_until


def disk_content() -> bytes:
    return drawn(1 << 20, zeros=1 << 20)


@pytest.fixture(scope="module")
def repository(served: tuple[Service, str]) -> BackupRepository:
    service = served[0]
    for name in ("intranet", "erp"):
        service.guests.image(name, disk_content())
    folder = service.settings.data_dir / "nas"
    folder.mkdir()
    return service.backups.add_repository(BackupRepositoryRequest(name="NAS", kind="local", path=str(folder)))


@pytest.fixture(scope="module")
def point(served: tuple[Service, str], repository: BackupRepository) -> RestorePoint:
    """Of a guest that was backed up, and not verified yet."""
    service = served[0]
    job = added(service, repository, "backed-up-before")
    run = ended(service.backups, service.backups.run_job(job.id).id)
    return service.backups.points.get(run.restore_point_ids[0])


@pytest.fixture
def gate(service: Service) -> Iterator[threading.Event]:
    """No run goes on before it is set."""
    gate = threading.Event()
    service.guests.gate = lambda: gate.wait(280)
    yield gate
    gate.set()
    service.guests.gate = lambda: None


def added(service: Service, repository: BackupRepository, name: str, *guests: str) -> BackupJob:
    request = BackupJobRequest(name=name, vm_ids=guests or ("intranet",), repository_id=repository.id)
    return service.backups.add_job(request)


def the_runs_end(page: Page, status: str) -> None:
    expect(page.locator("#run > .state .pill")).to_have_text(status)


def test_a_repository_is_added_and_its_key_is_shown_to_who_asks(page: Page, service: Service) -> None:
    folder = service.settings.data_dir / "taped"  # other tests of this service use it, too
    folder.mkdir()
    page.goto("/backups/repositories/new")
    page.fill("#field-name", "taped")
    page.fill("#field-local-path", "relative")
    page.click(".form button")
    expect(page.locator("#field-local-path-mistake")).to_contain_text("is not an absolute path")
    expect(page.locator("#field-peer-password")).to_be_hidden()
    expect(page.locator("#field-name")).to_have_value("taped")
    page.fill("#field-local-path", str(folder))
    page.click(".form button")
    expect(page.get_by_role("heading", level=1)).to_have_text("taped")
    expect(page.locator(".banner.note")).to_contain_text("Write its recovery key down now")
    made = next(one for one in service.backups.repositories.page(limit=100, cursor=None)[0] if one.name == "taped")
    key = service.backups.repositories.recovery_key(made.id)
    assert key not in page.content()
    page.get_by_role("button", name="Show the recovery key").click()
    expect(page.locator(".key")).to_have_text(key)
    # Forgotten, and used again by its key, which does not come back into the page.
    page.click("#ask-forget")
    page.get_by_role("button", name="Yes: forget it").click()
    expect(page.locator(f"#repository-{made.id}")).to_have_count(0)
    page.goto("/backups/repositories/new")
    page.fill("#field-name", "taped again")
    page.fill("#field-local-path", str(folder))
    page.fill("#field-recovery_key", "no such key")
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_have_count(1)
    assert "no such key" not in page.content()
    page.fill("#field-recovery_key", key)
    page.click(".form button")
    expect(page.get_by_role("heading", level=1)).to_have_text("taped again")


@pytest.mark.usefixtures("repository")
def test_a_job_is_added_and_run_and_watched_by_keyboard_alone(page: Page, service: Service, gate: threading.Event) -> None:
    page.goto("/backups")
    press_until(page, "main a[href='/backups/jobs/new']")
    page.keyboard.press("Enter")
    for field, text in (("name", "nightly"), ("vm_ids", "intranet\nerp"), ("retention-keep_last", "3")):
        press_until(page, f"#field-{field}")
        page.keyboard.type(text)
    press_until(page, ".form button")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("nightly")
    expect(page.locator(".facts")).to_contain_text("intranet, erp")
    expect(page.locator(".facts")).to_contain_text("3 newest")
    page.goto("/backups")
    expect(page.locator(".rows > li", has_text="nightly").locator(".pill")).to_have_text("Has not run yet")
    press_until(page, ".rows > li:has-text('nightly') button")
    page.keyboard.press("Enter")
    the_runs_end(page, "Preparing")
    run = page.url
    page.goto("/backups")
    row = page.locator(".rows > li", has_text="nightly")
    expect(row.locator(".pill")).to_have_text("Preparing")
    expect(row.get_by_role("button")).to_be_disabled()
    gate.set()
    # Without a reload.
    expect(row.locator(".pill")).to_have_text("Completed")
    expect(row.get_by_role("button")).to_be_enabled()
    page.goto(run)
    points = page.locator("section[aria-labelledby=h-points] li")
    expect(points).to_have_count(2)
    expect(points.first).to_contain_text("shut off")
    expect(points.first).to_contain_text("Not verified yet")


def test_a_run_is_watched_live_and_cancelled(
    page: Page, service: Service, repository: BackupRepository, gate: threading.Event
) -> None:
    job = added(service, repository, "to-be-cancelled")
    page.goto(f"/backups/jobs/{job.id}")
    page.get_by_role("button", name="Run now").click()
    the_runs_end(page, "Preparing")
    # What has the focus has it still when the page was brought up to date.
    press_until(page, "#to-job")
    page.evaluate("document.querySelector('#run').dataset.before = 'yes'")
    expect(page.locator("#run[data-before]")).to_have_count(0)
    expect(page.locator("#to-job")).to_be_focused()
    page.click("#ask-cancel")
    page.get_by_role("button", name="Yes: cancel it").click()
    gate.set()
    the_runs_end(page, "Cancelled")
    expect(page.locator("#ask-cancel")).to_have_count(0)


def test_a_run_that_fails_says_why(page: Page, service: Service, repository: BackupRepository) -> None:
    service.guests.image("nobody", b"x")
    job = added(service, repository, "of-nobody", "nobody")
    service.guests.remove("nobody")
    run = ended(service.backups, service.backups.run_job(job.id).id)
    page.goto(f"/backups/runs/{run.id}")
    expect(page.locator(".banner.bad")).to_contain_text("this host has no domain nobody")
    page.goto("/backups")
    expect(page.locator(f"#job-{job.id} .pill")).to_have_text("Failed")


def test_a_job_is_changed_and_removed(page: Page, service: Service, repository: BackupRepository) -> None:
    job = added(service, repository, "to-be-changed")
    page.goto(f"/backups/jobs/{job.id}/change")
    page.fill("#field-schedule", "every now and then")
    page.click(".form button")
    expect(page.locator("#field-schedule-mistake")).to_have_count(1)
    expect(page.locator("#field-schedule")).to_have_value("every now and then")
    page.fill("#field-schedule", "0 2 * * *")
    page.fill("#field-vm_ids", "erp")
    page.click(".form button")
    expect(page.locator(".facts")).to_contain_text("0 2 * * *")
    expect(page.locator(".facts")).to_contain_text(" 02:00:00 UTC")
    assert service.backups.job(job.id).vm_ids == ("erp",)
    page.goto(f"/backups/jobs/{job.id}/change")
    page.fill("#field-schedule", "")
    page.click(".form button")
    expect(page.locator(".facts")).to_contain_text("on request")
    page.click("#ask-remove")
    page.get_by_role("button", name="Yes: remove it").click()
    expect(page.locator(f"#job-{job.id}")).to_have_count(0)


def test_a_job_that_somebody_else_changes_meanwhile_is_not_lost(
    page: Page, service: Service, repository: BackupRepository
) -> None:
    job = added(service, repository, "changed-by-two")
    page.goto(f"/backups/jobs/{job.id}/change")
    page.fill("#field-schedule", "0 2 * * *")
    service.backups.change_job(job.id, BackupJobChange.model_validate({"retention": {"keep_daily": 7}}))
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("now there is Schedule: (empty); Days: 7")
    assert service.backups.job(job.id).retention.keep_daily == 7
    page.fill("#field-retention-keep_daily", "7")
    page.click(".form button")
    expect(page.locator(".facts")).to_contain_text("0 2 * * *")
    assert service.backups.job(job.id).retention.keep_daily == 7


def test_a_restore_point_is_verified_once_that_is_confirmed(page: Page, service: Service, point: RestorePoint) -> None:
    page.goto("/backups/points")
    row = page.locator(f"#point-{point.id}")
    expect(row.locator(".pill")).to_have_text("Not verified yet")
    row.get_by_role("link").click()
    page.click("#ask-verify")
    assert service.backups.points.get(point.id).state == "unverified"
    page.get_by_role("button", name="Yes: verify it").click()
    the_runs_end(page, "Completed")
    page.goto("/backups/points")
    expect(row.locator(".pill")).to_have_text("Verified")


def test_a_restore_point_is_restored_to_files_once_that_is_confirmed(page: Page, service: Service, point: RestorePoint) -> None:
    page.goto(f"/backups/points/{point.id}")
    page.click("#ask-restore")
    name = page.get_by_label("Name of the folder")
    name.fill("no/such/name")
    page.click(".form button")
    expect(name).to_have_accessible_description("has a character that a name cannot have")
    name.fill("by-hand")
    page.click(".form button")
    folder = service.settings.data_dir / "exports" / "by-hand"
    expect(page.get_by_role("heading", level=1)).to_have_text("Restore it?")
    assert not folder.exists()
    page.get_by_role("button", name="Yes: restore it").click()
    the_runs_end(page, "Completed")
    expect(page.locator(".banner.good")).to_contain_text("exports/by-hand")
    assert (folder / "0-vda.raw").read_bytes() == disk_content()


def test_what_cannot_be_restored_is_said_beside_the_form(page: Page, point: RestorePoint) -> None:
    page.goto(f"/backups/points/{point.id}/restore")
    page.uncheck("#disk-1")
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("no disk is chosen")
    page.check("#disk-1")
    page.check("#target-in_place")
    expect(page.get_by_label("Name of the folder")).to_be_hidden()
    page.click(".form button")
    expect(page.locator("main")).to_contain_text("what was written since is lost")
    expect(page.locator("button.danger")).to_have_count(1)
    # This service has files for guests, and no hypervisor.
    page.get_by_role("button", name="Yes: restore it").click()
    expect(page.locator(".banner.bad")).to_contain_text("no hypervisor")
    expect(page.locator("#target-in_place")).to_be_checked()


def test_a_protected_point_is_not_removed(page: Page, service: Service, repository: BackupRepository) -> None:
    job = added(service, repository, "protects")
    run = ended(service.backups, service.backups.run_job(job.id).id)
    here = f"/backups/points/{run.restore_point_ids[0]}"
    page.goto(here)
    page.get_by_role("button", name="Protect").click()
    expect(page.locator(".state .pill.note")).to_have_text("Protected")
    page.click("#ask-remove")
    page.get_by_role("button", name="Yes: remove it").click()
    expect(page.locator(".banner.bad")).to_contain_text("E_BAK_CONFLICT")
    page.goto(here)
    page.get_by_role("button", name="Protect it no more").click()
    expect(page.locator(".state .pill.note")).to_have_count(0)
    page.click("#ask-remove")
    page.get_by_role("button", name="Yes: remove it").click()
    expect(page.locator(f"#point-{run.restore_point_ids[0]}")).to_have_count(0)


def test_what_retention_does_is_shown_before_it_is_done(page: Page, service: Service, repository: BackupRepository) -> None:
    job = added(service, repository, "keeps-less")
    for _ in range(2):
        ended(service.backups, service.backups.run_job(job.id).id)
    page.goto(f"/backups/jobs/{job.id}")
    points = page.locator("section[aria-labelledby=h-points] li")
    expect(points).to_contain_text(["everything is kept", "everything is kept"])
    service.backups.change_job(job.id, BackupJobChange(retention=Retention(keep_last=1)))
    page.reload()
    expect(points).to_contain_text(["one of the newest", "Goes with the next run"])
    page.click("#ask-retire")
    expect(page.locator(".lead")).to_have_text("keeps-less: 1 restore point")
    page.get_by_role("button", name="Yes: remove them").click()
    expect(points).to_contain_text(["one of the newest"])
    expect(page.locator("#ask-retire")).to_have_count(0)


@pytest.mark.usefixtures("point")
def test_a_repository_is_verified_and_collected(page: Page, repository: BackupRepository) -> None:
    for action, button in (("verify", "Yes: verify it"), ("collect", "Yes: collect it")):
        page.goto(f"/backups/repositories/{repository.id}")
        page.click(f"#ask-{action}")
        page.get_by_role("button", name=button).click()
        the_runs_end(page, "Completed")
        if action == "verify":
            expect(page.locator("section[aria-labelledby=h-report]")).to_contain_text("All of it is as it was written.")


@pytest.mark.timeout(300)
def test_backups_can_be_read_by_everybody(page: Page, repository: BackupRepository, point: RestorePoint) -> None:
    here = f"/backups/points/{point.id}"
    pages = {
        "jobs": "/backups",
        "job": f"/backups/jobs/{point.job_id}",
        "job-form": "/backups/jobs/new",
        "run": f"/backups/runs/{point.run_id}",
        "points": "/backups/points",
        "point": here,
        "restore": f"{here}/restore",
        "repositories": "/backups/repositories",
        "repository": f"/backups/repositories/{repository.id}?is_new=true",
        "repository-form": "/backups/repositories/new",
    }
    for name, path in pages.items():
        page.goto(path)
        expect(page.get_by_role("heading", level=1)).to_have_count(1)
        look_at(page, f"backup-{name}")


def test_a_backup_job_without_a_repository_leads_to_one(browser: Browser, tmp_path: Path) -> None:
    empty = Service(tmp_path)
    with serving(empty) as address, opened(browser, address) as context:
        page = context.new_page()
        page.goto("/backups/jobs/new")
        expect(page.locator("form.form")).to_have_count(0)
        page.click("main a[href='/backups/repositories/new']")
        expect(page.locator("h1")).to_have_text("Add a repository")
        page.goto("/")
        expect(page.locator("#nothing")).to_contain_text("A new migration begins with")
        look_at(page, "migrations-none")
    empty.close()
