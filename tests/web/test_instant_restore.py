"""On the page: a restore whose guest starts at once, watched, and given up by who says that its writes are lost."""

from collections.abc import Iterator
from random import Random

import pytest
from playwright.sync_api import Page, expect

from synvirt.backups.model import BackupJobRequest, BackupRepositoryRequest
from tests.fakes.backups import ended
from tests.fakes.hypervisor import FakeHypervisor
from tests.fakes.restoring import XML, restore_host_of
from tests.fakes.service import Service
from tests.web.conftest import serving


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """Its guests never get onto their volumes."""
    folder = tmp_path_factory.mktemp("web")
    made = Service(folder / "service", restore_host=restore_host_of(folder, FakeHypervisor(fail="pivot")))
    made.guests.xml = XML
    made.guests.image("web", Random(8).randbytes(1 << 20))
    (folder / "nas").mkdir()
    with serving(made) as address:
        yield made, address
    made.close()


def test_a_guest_is_started_at_once_and_given_up(page: Page, service: Service) -> None:
    folder = service.settings.data_dir.parent / "nas"
    request = BackupRepositoryRequest(name="NAS", kind="local", path=str(folder))
    known = service.backups.add_repository(request)
    job = service.backups.add_job(BackupJobRequest(name="nightly", vm_ids=("web",), repository_id=known.id))
    (point,) = ended(service.backups, service.backups.run_job(job.id).id).restore_point_ids
    page.goto(f"/backups/points/{point}/restore")
    page.check("#target-new_domain")
    page.get_by_label("Start it at once, and copy it while it runs").check()
    page.click(".form button")
    page.get_by_role("button", name="Yes: restore it").click()
    expect(page.locator(".banner[role=status]")).to_contain_text("Its guest was started at once")
    expect(page.locator(".banner[role=alert]")).to_contain_text("It goes on")
    page.get_by_role("link", name="Cancel, and lose what the guest wrote").click()
    expect(page.locator("main")).to_contain_text("what it wrote is lost")
    page.get_by_role("button", name="Yes: stop it, and lose that").click()
    expect(page.locator(".banner[role=alert]")).to_contain_text("Cancelled")
    expect(page.locator(".banner[role=status]")).to_have_count(0)
