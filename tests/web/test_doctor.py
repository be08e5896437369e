"""The doctor's page: what is missing first, and how to get it."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from synvirt.doctor import Finding
from tests.fakes.service import Service
from tests.web.conftest import look_at
from tests.web.test_pages import press_until

KVM = Finding("kvm", False, False, "no /dev/kvm; guests are emulated, slowly", "guests at full speed", "enable virtualisation")
STORE = Finding(
    "store", False, True, "the store cannot be opened: disk I/O error", "jobs, sources", "free the disk of data_dir"
)
QEMU = Finding("qemu-img", True, True, "/usr/bin/qemu-img: version 7.2", "disk images", "apt-get install qemu-utils")


@pytest.fixture
def service(service: Service) -> Iterator[Service]:
    service.findings = [QEMU, STORE, KVM]
    yield service
    service.findings = []


def test_what_is_missing_comes_with_its_mending_line(page: Page, service: Service) -> None:
    page.goto("/doctor")
    page.get_by_role("button", name="Look again").click()
    expect(page.locator(".banner.bad")).to_contain_text("cannot do its work")
    sections = page.locator("main section")
    expect(sections.locator("h2")).to_have_text(["Missing, and needed", "Missing; needed for some things only", "Found"])
    expect(sections.nth(0)).to_contain_text("the store cannot be opened: disk I/O error")
    expect(sections.nth(0).locator(".hint")).to_have_text("free the disk of data_dir")
    expect(sections.nth(1).locator(".hint")).to_have_text("enable virtualisation")
    expect(sections.nth(2)).to_contain_text("/usr/bin/qemu-img: version 7.2")
    expect(sections.nth(2).locator(".hint")).to_have_count(0)
    look_at(page, "doctor")


def test_what_was_repaired_is_seen_by_keyboard_alone(page: Page, service: Service) -> None:
    page.goto("/")
    press_until(page, "nav a[href='/doctor']")
    page.keyboard.press("Enter")
    expect(page).to_have_title("Doctor · SynVirt")
    service.findings = [QEMU]
    press_until(page, "main button")
    page.keyboard.press("Enter")
    expect(page.locator(".banner.good")).to_contain_text("All that is needed is here.")
    expect(page.locator(".checks li")).to_have_count(1)
