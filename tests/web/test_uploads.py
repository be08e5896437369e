"""Uploads on the page: sent with a progress, stopped, refused, dropped, sent by a plain form; listed, imported, removed."""

import base64
import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from synvirt.model.files import Upload
from synvirt.model.kinds import Mode, OfflineKind, State
from synvirt.model.plan import MigrationPlan, PlanSource, UploadRef
from synvirt.sizes import MIB
from tests.fakes.service import Service
from tests.offline import appliances
from tests.web.conftest import opened, serious
from tests.web.test_pages import press_until

DIGEST_OF_SOMETHING_ELSE = hashlib.sha256(b"something else").hexdigest()
# Slow enough that it is still being sent when it is looked at: four megabytes, in no less than half a minute.
LARGE_BYTES, SLOW_BPS = 4 * MIB, 128 * 1024


@pytest.fixture(scope="module")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return appliances.image(tmp_path_factory.mktemp("sent"), "münchen & web.qcow2", "qcow2", appliances.raw_disk())


@pytest.fixture
def service(service: Service) -> Iterator[Service]:
    """Without uploads, before and after each test."""
    yield service
    for job in service.store.unended():
        service.move(job.id, State.CANCELLED)
    for upload in listed(service):
        service.uploads.remove(upload.id)


def listed(service: Service) -> list[Upload]:
    return service.uploads.page(limit=100)[0]


def received(service: Service, page: Page, disk: Path) -> Upload:
    """The page of a machine whose file was sent is shown; the file is here as it was there."""
    expect(page.locator("h1")).to_have_text("münchen & web")
    [upload] = listed(service)
    assert (upload.filename, upload.sha256) == (disk.name, hashlib.sha256(disk.read_bytes()).hexdigest())
    assert str(upload.id) in page.url
    return upload


def test_a_file_is_chosen_and_sent_by_keyboard_alone(page: Page, service: Service, disk: Path) -> None:
    # From here on the browser asks us for files: who begins to listen only when the key is pressed may be too late.
    page.on("filechooser", lambda _chooser: None)
    page.goto("/uploads")
    press_until(page, "#f-file")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Space")
    chooser.value.set_files(disk)
    expect(page.locator("[data-name]")).to_contain_text("münchen & web.qcow2")
    press_until(page, "summary")
    page.keyboard.press("Enter")
    press_until(page, "#f-sha256")
    page.keyboard.type(hashlib.sha256(disk.read_bytes()).hexdigest().upper())
    press_until(page, ".drop button[type=submit]")
    page.keyboard.press("Enter")
    received(service, page, disk)


def test_a_file_is_dropped_on_a_new_migration(page: Page, service: Service, disk: Path) -> None:
    page.goto("/new")
    held = page.evaluate_handle(
        """([name, base64]) => {
            const held = new DataTransfer();
            held.items.add(new File([Uint8Array.from(atob(base64), (byte) => byte.charCodeAt(0))], name));
            return held;
        }""",
        [disk.name, base64.b64encode(disk.read_bytes()).decode()],
    )
    page.dispatch_event(".drop .target", "dragover", {"dataTransfer": held})
    expect(page.locator(".drop.over")).to_have_count(1)
    page.dispatch_event(".drop .target", "drop", {"dataTransfer": held})
    expect(page.locator("[data-name]")).to_contain_text("münchen & web.qcow2")
    page.click(".drop button[type=submit]")
    received(service, page, disk)


def test_how_far_it_is_is_shown_and_stopping_leaves_nothing(page: Page, service: Service) -> None:
    page.goto("/uploads")
    page.context.new_cdp_session(page).send(
        "Network.emulateNetworkConditions",
        {"offline": False, "latency": 0, "downloadThroughput": -1, "uploadThroughput": SLOW_BPS},
    )
    page.set_input_files("#f-file", {"name": "large.ova", "mimeType": "application/x-tar", "buffer": bytes(LARGE_BYTES)})
    page.click(".drop button[type=submit]")
    expect(page.locator("[data-figures]")).to_contain_text("of 4.0 MiB")
    expect(page.locator("[data-stop]")).to_be_focused()
    assert serious(page) == []
    page.keyboard.press("Enter")
    expect(page.locator("[data-mistake]")).to_contain_text("It was stopped. Nothing of the file was kept.")
    expect(page.locator(".drop button[type=submit]")).to_be_visible()
    assert listed(service) == []


def test_a_connection_that_breaks_is_said_and_the_file_can_be_sent_again(page: Page, service: Service, disk: Path) -> None:
    page.goto("/uploads")
    page.set_input_files("#f-file", disk)
    page.route("**/api/v1/migrator/uploads", lambda route: route.abort("connectionreset"))
    page.click(".drop button[type=submit]")
    expect(page.locator("[data-mistake]")).to_contain_text("The connection broke")
    page.unroute("**/api/v1/migrator/uploads")
    page.click(".drop button[type=submit]")
    received(service, page, disk)


@pytest.mark.parametrize("javascript", [True, False])
def test_a_file_that_is_not_the_announced_one_is_refused(
    browser: Browser, served: tuple[Service, str], service: Service, disk: Path, javascript: bool
) -> None:
    with opened(browser, served[1], java_script_enabled=javascript) as context:
        page = context.new_page()
        page.goto("/uploads")
        page.set_input_files("#f-file", disk)
        page.click("summary")
        page.fill("#f-sha256", DIGEST_OF_SOMETHING_ELSE)
        page.click(".drop button[type=submit]")
        reported = page.locator("[data-mistake]" if javascript else ".banner.bad")
        expect(reported).to_contain_text("was announced")
        expect(reported).to_contain_text("send it again")
    assert listed(service) == []


def test_a_file_that_is_too_large_is_refused_before_it_is_sent(
    page: Page, service: Service, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service.uploads, "cap_bytes", 1000)
    requests: list[str] = []
    page.on("request", lambda request: requests.append(f"{request.method} {request.url}"))
    page.goto("/uploads")
    page.set_input_files("#f-file", disk)
    page.click(".drop button[type=submit]")
    expect(page.locator("[data-mistake]")).to_contain_text("and the limit is 1000 B")
    assert not any(one.startswith("POST") for one in requests)
    expect(page.locator(".drop button[type=submit]")).to_be_visible()


def test_it_works_without_javascript(browser: Browser, served: tuple[Service, str], service: Service, disk: Path) -> None:
    with opened(browser, served[1], java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/uploads")
        page.set_input_files("#f-file", disk)
        page.click(".drop button[type=submit]")
        upload = received(service, page, disk)
        page.click("text=Review the plan")
        page.click("text=Start the migration")
        expect(page.locator(".stations .here b")).to_have_text("Queued")
    assert service.store.get(service.begun[-1]).plan.source_ref == UploadRef(kind="upload", upload_id=upload.id)


def sent(service: Service, disk: Path) -> Upload:
    incoming = service.uploads.begin(disk.name)
    incoming.write(memoryview(disk.read_bytes()))
    return incoming.finish(None)


def test_one_is_listed_imported_and_removed(page: Page, service: Service, disk: Path) -> None:
    upload = sent(service, disk)
    page.goto("/uploads")
    row = page.locator(f"#upload-{upload.id}")
    row.get_by_role("link", name="Import").click()
    expect(page.locator("h1")).to_have_text("münchen & web")
    page.go_back()
    row.get_by_role("link", name="Remove").click()
    expect(page.locator("h1")).to_have_text("Remove this upload?")
    assert [one.id for one in listed(service)] == [upload.id]
    page.click("text=Yes: remove")
    expect(page.locator(".nothing")).to_have_text("Nothing was uploaded.")
    assert listed(service) == []


def test_one_that_a_job_reads_stays_and_the_page_says_why(page: Page, service: Service, disk: Path) -> None:
    upload = sent(service, disk)
    source = PlanSource(Offline=OfflineKind.QCOW2)
    service.submit(MigrationPlan(source=source, source_ref=UploadRef(kind="upload", upload_id=upload.id), mode=Mode.COLD))
    page.goto(f"/uploads/{upload.id}/remove")
    page.click("text=Yes: remove")
    expect(page.locator(".banner.bad")).to_contain_text("is read by 1 job")
    assert [one.id for one in listed(service)] == [upload.id]
