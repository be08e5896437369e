"""The pictures of the README, made again: python -m tests.web.pictures."""

import tempfile
from dataclasses import replace
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from synvirt.destinations.directory import DirectoryDestination
from synvirt.live.registry import BY_KIND
from synvirt.model.kinds import LiveKind
from synvirt.model.machine import Concern, Disk, GuestOs, Nic, VmManifest
from synvirt.model.sources import SourceRequest
from synvirt.sizes import GIB, TIB
from tests.fakes.live import FakeAdapter, FakePlatform
from tests.fakes.service import Service
from tests.web import jobs
from tests.web.conftest import QUIET, chromium, opened, serving

IMAGES = Path(__file__).parents[2] / "docs/images"
VM_ID = "vm-42"
MACHINE = VmManifest(
    vm_id=VM_ID,
    name="erp-db-01",
    power_state="on",
    firmware="uefi",
    secure_boot=True,
    cpu_count=8,
    memory_bytes=32 * GIB,
    guest_os=GuestOs(family="windows", id="windows2022srv_64Guest", name="Windows Server 2022"),
    cbt_available=True,
    disks=(
        Disk(key="2000", label="Hard disk 1", capacity_bytes=120 * GIB, used_bytes=61 * GIB, format="vmdk", cbt_enabled=True),
        Disk(key="2001", label="Hard disk 2", capacity_bytes=500 * GIB, used_bytes=188 * GIB, format="vmdk", cbt_enabled=True),
    ),
    nics=(
        Nic(key="4000", mac="00:50:56:9a:1f:42", model="vmxnet3", network="VM Network", ip_addresses=("10.2.0.18",)),
        Nic(key="4001", mac="00:50:56:9a:1f:43", model="vmxnet3", network="Storage"),
    ),
    concerns=(
        Concern(
            id="secure-boot",
            category="Warning",
            label="Secure Boot",
            assessment="The VM uses Secure Boot. The imported VM starts with Microsoft's keys; own keys are not moved.",
            remedy="Enrol own keys again after the import.",
        ),
    ),
)


class Adapter(FakeAdapter):
    async def inspect(self, vm_id: str) -> VmManifest:
        return MACHINE


class Large(DirectoryDestination):
    def free_bytes(self) -> int:
        return 3 * TIB


def picture(page: Page, name: str) -> None:
    page.screenshot(path=IMAGES / f"{name}.png", full_page=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        platform = FakePlatform(Path(folder) / "platform")
        kind = replace(BY_KIND[LiveKind.VIM_API], open=lambda _: Adapter(platform))
        service = Service(Path(folder) / "service", platforms={**BY_KIND, LiveKind.VIM_API: kind})
        request = SourceRequest(
            name="vcenter.example",
            kind=LiveKind.VIM_API,
            endpoint="https://vcenter.example",
            credentials={"user": "synvirt@vsphere.local", "password": "no secret"},
        )
        service.destinations["directory"] = Large(service.settings.volumes_dir)
        source = service.sources.add(request)
        for make in (jobs.completed, jobs.moved, jobs.unbooted, jobs.warm, jobs.downgraded):
            make(service)
        with serving(service) as address, sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium(), args=["--no-sandbox", *QUIET])
            with opened(browser, address, color_scheme="light", viewport={"width": 1200, "height": 844}) as context:
                page = context.new_page()
                page.goto("/")
                page.wait_for_load_state("networkidle")
                picture(page, "page-migrations")
                # As high as the page: the bar with its buttons is at its foot then.
                page.set_viewport_size({"width": 1200, "height": 1820})
                page.goto(f"/new/machine?kind=live_vm&source_id={source.id}&vm_id={VM_ID}")
                page.check("[value=Warm]")
                picture(page, "page-new")
            browser.close()
        service.close()


if __name__ == "__main__":
    main()
