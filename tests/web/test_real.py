"""The whole product as people use it: `synvirt serve` in a process of its own, under a {base_url}, and a browser. A real OVA is
sent, set up and reviewed on the page, and its real job watched there to its end."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.needs import need
from tests.offline import appliances
from tests.real.test_service import service, volumes
from tests.web.conftest import opened

BASE = "/kvm"


@pytest.mark.slow
def test_an_appliance_that_is_dropped_becomes_a_domain(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need("qemu-system-x86_64", "qemu-system-x86")
    ova = appliances.archive(tmp_path / "branch.ova", appliances.appliance("virtualbox"))
    monkeypatch.setenv("SYNVIRT_BASE_URL", BASE)
    data_dir = tmp_path / "data"
    with service(data_dir):
        log = (tmp_path / "serve.log").read_text()
        address = re.search(rf"SynVirt serves at (\S+){BASE}/\n", log)
        password = re.search(r"with the password (\S+):", log)
        assert address
        assert password
        with opened(browser, address[1], password=password[1], base=BASE) as context:
            page = context.new_page()
            page.goto(f"{BASE}/")
            page.click("main >> text=New migration")
            page.set_input_files("#f-file", ova)
            page.click(".drop button[type=submit]")
            expect(page.locator("#h-machine")).to_be_visible()
            page.fill("#f-name", "branch-office")
            # Its disk is noise, and boots nowhere.
            page.uncheck("[name=start]")
            page.click("text=Review the plan")
            expect(page.locator("table.fits")).to_contain_text("from its file read where it lies, as vmdk")
            expect(page.locator("#expected")).to_contain_text("no job of this source has ended here yet")
            expect(page.locator("#problems")).to_be_hidden()
            page.click("text=Start the migration")
            expect(page.locator("h1")).to_have_text("branch-office")
            expect(page.locator(".stations .end b")).to_have_text("Completed", timeout=120_000)
            expect(page.locator("#facts")).to_contain_text("branch-office")
            page.goto(f"{BASE}/")
            expect(page.locator("section[aria-labelledby=h-ended] .pill")).to_have_text("Completed")
    [volume] = volumes(data_dir)
    assert volume.read_bytes()[: appliances.DISK_BYTES] == appliances.raw_disk(appliances.DISK_BYTES, seed=0)
