"""The pages of sources: added, tested, their certificates pinned, their machines looked through, changed and removed."""

from collections.abc import Iterator
from dataclasses import replace
from uuid import UUID

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect
from pydantic import SecretStr, ValidationError

from synvirt.live import SourceAccess, VmRow
from synvirt.live.registry import BY_KIND
from synvirt.model.kinds import LiveKind, State
from synvirt.model.plan import LiveVmRef
from synvirt.model.sources import Source, SourceChange, SourceRequest
from synvirt.web.fields import fields, values
from synvirt.web.forms import Form
from tests.fakes.live import FakeAdapter, FakePlatform
from tests.fakes.service import Service
from tests.web import jobs
from tests.web.conftest import look_at, opened, serving
from tests.web.test_pages import press_until

SECRET = " tr0ub4dor & 3 "
VMS = 2000
WRONG_PIN = ":".join(["AB"] * 32)


class ManyMachines(FakeAdapter):
    async def list_vms(self) -> list[VmRow]:
        return [VmRow(f"vm-{n}", f"web-{n:04}", "on", cpu_count=2, memory_bytes=4 << 30) for n in range(VMS)]


@pytest.fixture(scope="module")
def accesses() -> list[SourceAccess]:
    """What each session was opened with."""
    return []


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> FakePlatform:
    return FakePlatform(tmp_path_factory.mktemp("platform"))


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, platform: FakePlatform, accesses: list[SourceAccess]
) -> Iterator[tuple[Service, str]]:
    """libvirt and vSphere are the fake platform; where vSphere is reached, certificate and all, is the service itself."""

    def opened_with(access: SourceAccess) -> FakeAdapter:
        accesses.append(access)
        return ManyMachines(platform)

    kinds = (LiveKind.LIBVIRT_REMOTE, LiveKind.VIM_API)
    fakes = {kind: replace(BY_KIND[kind], open=opened_with) for kind in kinds}
    made = Service(tmp_path_factory.mktemp("web"), platforms={**BY_KIND, **fakes})
    with serving(made) as address:
        yield made, address
    made.close()


def added(service: Service, name: str, endpoint: str = "https://vcenter.invalid", **options: object) -> Source:
    credentials = {"user": SecretStr("root"), "password": SecretStr(SECRET)}
    return service.sources.add(
        SourceRequest(name=name, kind=LiveKind.VIM_API, endpoint=endpoint, credentials=credentials, options=options)
    )


def test_a_source_is_added_and_tested_by_keyboard_alone(page: Page, service: Service, accesses: list[SourceAccess]) -> None:
    page.goto("/sources")
    press_until(page, "main a[href='/sources/new']")
    page.keyboard.press("Enter")
    press_until(page, "a[href='/sources/new/libvirt_remote']")
    page.keyboard.press("Enter")
    for field, text in (("name", "kvm-07"), ("endpoint", "qemu:///system"), ("credentials-password", SECRET)):
        press_until(page, f"#field-{field}")
        page.keyboard.type(text)
    press_until(page, ".form button")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("kvm-07")
    expect(page.locator("#test .checks")).to_contain_text("the fake platform 1.0")
    expect(page.locator("#test .checks .bad")).to_have_count(0)
    assert accesses[-1].credentials == {"password": SECRET}
    assert accesses[-1].options["nbd_ports"] == [10809, 10872]
    page.goto("/sources")
    expect(page.locator(".rows > li", has_text="kvm-07").locator(".pill")).to_have_text("It works")


def test_what_is_wrong_is_said_beside_what_was_typed(page: Page, service: Service) -> None:
    before = len(service.sources.page(limit=1000, cursor=None)[0])
    page.goto("/sources/new/vim_api")
    page.fill("#field-name", "typed")
    page.fill("#field-endpoint", "ftp://vcenter.invalid")
    page.fill("#field-credentials-user", "root")
    page.fill("#field-credentials-password", SECRET)
    page.click("summary")
    page.fill("#field-options-shutdown_timeout_s", "soon")
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("Shutdown timeout (seconds): is not a number")
    expect(page.get_by_label("Shutdown timeout")).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("Shutdown timeout")).to_have_accessible_description("is not a number")
    expect(page.locator("#field-endpoint")).to_have_value("ftp://vcenter.invalid")
    expect(page.locator("#field-credentials-password")).to_have_value("")
    expect(page.locator("#field-options-shutdown_timeout_s")).to_have_value("soon")
    assert SECRET.strip() not in page.content()
    page.fill("#field-options-shutdown_timeout_s", "20")
    page.fill("#field-credentials-password", SECRET)
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("its scheme is 'ftp'")
    assert len(service.sources.page(limit=1000, cursor=None)[0]) == before


def test_a_certificate_that_has_changed_is_shown_and_pinned(page: Page, served: tuple[Service, str]) -> None:
    service, address = served
    source = added(service, "has-a-new-certificate", address, fingerprint_sha256=WRONG_PIN)
    page.goto(f"/sources/{source.id}")
    failed = page.locator("#test .checks .bad")
    expect(failed).to_have_count(1)
    expect(failed).to_contain_text("is not the pinned one")
    expect(failed.locator(".hint")).to_contain_text("an attacker may be in between")
    page.click("#ask-pin")
    expect(page.locator("main")).to_contain_text(f"Pinned is now {WRONG_PIN}")
    assert service.sources.get(source.id).options["fingerprint_sha256"] == WRONG_PIN
    page.get_by_role("button", name="Yes: pin it").click()
    expect(page.locator("#test .checks")).to_contain_text("as pinned")
    expect(page.locator("#test .checks .bad")).to_have_count(0)
    expect(page.locator("#ask-pin")).to_have_count(0)


def test_two_thousand_machines_are_searched_and_paged(page: Page, service: Service) -> None:
    source = added(service, "has-many")
    page.goto(f"/sources/{source.id}")
    page.click("#vms")
    machines = page.locator("#vms li")
    expect(machines).to_have_count(100)
    expect(machines.first).to_contain_text("web-0000")
    page.locator("a[rel=next]").click()
    expect(machines.first).to_contain_text("web-0100")
    page.wait_for_load_state("load")  # what is typed before the script is there is searched for by the button
    page.get_by_role("searchbox").fill("WEB-17")
    expect(machines.first).to_contain_text("web-1700")
    expect(machines).to_have_count(100)
    page.get_by_role("searchbox").fill("vm-1999")
    expect(machines).to_have_count(1)
    expect(machines).to_contain_text("web-1999")


def test_what_is_not_typed_again_stays_sealed_as_it_was(page: Page, service: Service, accesses: list[SourceAccess]) -> None:
    source = added(service, "to-be-changed")
    page.goto(f"/sources/{source.id}/change")
    assert SECRET.strip() not in page.content()
    page.fill("#field-name", "changed")
    page.uncheck("#field-options-verify_tls")
    page.click(".form button")
    expect(page.get_by_role("heading", level=1)).to_have_text("changed")
    expect(page.locator("#facts, .facts")).to_contain_text("no")
    page.goto(f"/new/source/{source.id}")
    expect(page.locator("#vms li")).to_have_count(100)
    assert accesses[-1].credentials == {"user": "root", "password": SECRET}
    assert accesses[-1].options["verify_tls"] is False
    # What was sealed for one address is not sent to another.
    page.goto(f"/sources/{source.id}/change")
    page.fill("#field-endpoint", "https://elsewhere.invalid")
    page.click(".form button")
    expect(page.locator(".banner.bad")).to_contain_text("required with another endpoint")
    page.fill("#field-credentials-user", "root")
    page.fill("#field-credentials-password", "new")
    page.click(".form button")
    expect(page.locator("main .address")).to_have_text("https://elsewhere.invalid")


PIN = ":".join(["AB"] * 32)


def test_a_pin_that_somebody_else_sets_meanwhile_is_not_lost(page: Page, service: Service) -> None:
    source = added(service, "changed-by-two")
    page.goto(f"/sources/{source.id}/change")
    page.fill("#field-name", "mine")
    service.sources.change(source.id, SourceChange(options={"fingerprint_sha256": PIN}))
    page.click(".form button")
    banner = page.locator(".banner.bad")
    expect(banner).to_contain_text("changed since this form was opened; now there is Name: changed-by-two; Pinned certificate")
    expect(page.locator("#field-name")).to_have_value("mine")
    assert service.sources.get(source.id).options["fingerprint_sha256"] == PIN
    page.click(".form button")
    expect(page.get_by_role("heading", level=1)).to_have_text("mine")
    assert not service.sources.get(source.id).options.get("fingerprint_sha256")


def test_a_source_is_removed_once_that_is_confirmed_and_nothing_reads_from_it(page: Page, service: Service) -> None:
    source = added(service, "to-be-removed")
    ref = LiveVmRef(kind="live_vm", source_id=source.id, vm_id="vm-42")
    plan = jobs.WARM_PLAN.model_copy(update={"source_ref": ref})
    job_id = jobs.added(service, "reads-from-it", (State.QUEUED, 5), (State.COPYING_FULL, 4), plan=plan)
    page.goto(f"/sources/{source.id}")
    page.click("#ask-remove")
    page.get_by_role("button", name="Yes: remove it").click()
    expect(page.locator(".banner.bad")).to_contain_text("E_MIG_CONFLICT")
    service.move(job_id, State.FAILED)
    page.goto(f"/sources/{source.id}/remove")
    page.get_by_role("button", name="Yes: remove it").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Sources")
    expect(page.locator(f"#source-{source.id}")).to_have_count(0)


def test_sources_can_be_read_by_everybody(page: Page, served: tuple[Service, str]) -> None:
    service, address = served
    source = added(service, "looked-at", address, fingerprint_sha256=WRONG_PIN)
    here = f"/sources/{source.id}"
    pages = {"sources": "/sources", "source-kinds": "/sources/new", "source-remove": f"{here}/remove", "source": here}
    pages |= {f"source-form-{kind}": f"/sources/new/{kind}" for kind in (LiveKind.LIBVIRT_REMOTE, LiveKind.VIM_API)}
    for name, path in pages.items():
        page.goto(path)
        if name == "source":
            expect(page.locator("#ask-pin")).to_be_visible()
        look_at(page, name)


def test_it_is_added_and_tested_without_javascript(browser: Browser, served: tuple[Service, str]) -> None:
    with opened(browser, served[1], java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/sources/new/libvirt_remote")
        page.fill("#field-name", "no-script")
        page.fill("#field-endpoint", "qemu:///system")
        page.click(".form button")
        expect(page.locator("#test")).to_contain_text("It has not been tested yet")
        page.get_by_role("button", name="Test it").click()
        expect(page.locator("#test .checks")).to_contain_text("the fake platform 1.0")


@pytest.mark.parametrize("kind", LiveKind)
def test_every_platforms_form_gives_back_what_it_begins_with(kind: LiveKind) -> None:
    """Nothing typed is nothing but the defaults, read as the model's own types."""
    options = BY_KIND[kind].form.options
    known = fields(options)
    assert {one.key for one in known} == set(options.model_fields)
    form = Form({one.name: (one.value,) for one in known if one.value})
    assert options.model_validate(values(known, form)) == options()


def test_texts_by_name_are_typed_as_lines_and_shown_so_again() -> None:
    options = BY_KIND[LiveKind.PVE_API].form.options
    typed = Form({"node_hosts": ("pve1=10.0.0.1\r\n pve2 = fd00::2\r\n\r\n",)})
    filled = values(fields(options), typed)
    assert filled["node_hosts"] == {"pve1": "10.0.0.1", "pve2": "fd00::2"}
    shown = {one.key: one.value for one in fields(options, values=filled)}
    assert shown["node_hosts"] == "pve1=10.0.0.1\npve2=fd00::2"
    with pytest.raises(ValidationError):
        options.model_validate(values(fields(options), Form({"node_hosts": ("pve1",)})))


def test_a_source_that_is_not_there_is_a_page(context: BrowserContext) -> None:
    answer = context.new_page().goto(f"/sources/{UUID(int=0)}")
    assert answer is not None
    assert answer.status == 404
