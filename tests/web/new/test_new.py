"""A new migration, in a real browser: from a platform, a file of the host and a URL; by keyboard alone; without JavaScript;
what is wrong is shown next to its field."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect

from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import Source
from synvirt.model.windows import Window
from tests.fakes.live import FakePlatform
from tests.fakes.service import Service, failed
from tests.servers.remote_servers import PASSWORD as PASSWORD_THERE
from tests.servers.remote_servers import USER as USER_THERE
from tests.servers.remote_servers import nginx
from tests.web.conftest import look_at, opened, serious
from tests.web.new.conftest import TAKEN
from tests.web.test_pages import press_until


def begun(service: Service, page: Page) -> Migration:
    """The job whose page this is."""
    expect(page.locator(".stations .here b")).to_have_text("Queued")
    found = [job for job in service.begun if str(job) in page.url]
    assert len(found) == 1
    return service.store.get(found[0])


def test_a_vm_of_a_platform_is_migrated_by_keyboard_alone(page: Page, service: Service, source: Source) -> None:
    page.goto("/")
    press_until(page, "main a[href='/new']")
    page.keyboard.press("Enter")
    expect(page).to_have_title("New migration · SynVirt")
    press_until(page, f"main a[href='/new/source/{source.id}']")
    page.keyboard.press("Enter")
    expect(page.locator("#vms li")).to_have_count(6)
    press_until(page, "#f-search")
    page.keyboard.type("ERP")
    expect(page.locator("#vms li")).to_have_count(1)
    press_until(page, "#vms li a")
    page.keyboard.press("Enter")
    expect(page.locator("h1")).to_have_text("vm-erp")
    press_until(page, "[name=mode]")
    page.keyboard.press("ArrowDown")
    press_until(page, "[name=cutover]")
    page.keyboard.press("ArrowDown")
    press_until(page, "#f-network-1")
    page.keyboard.type("bridge:br0")
    press_until(page, "#f-cpu_count")
    page.keyboard.type("4")
    press_until(page, "#f-memory")
    page.keyboard.type("8 GiB")
    press_until(page, ".bottom button")
    page.keyboard.press("Enter")
    expect(page.locator(".changed th")).to_have_text(["Processors", "Memory", "Network"])
    expect(page.locator(".stations b")).to_have_count(7)
    expect(page.locator("tr", has_text="boot")).to_contain_text("copied, while it runs the source tracks its changes")
    expect(page.locator("#expected dd")).to_have_text(
        ["3.0 GiB", "about 1 min 15 s", "about 9 s, 1 min 1 s at p95", "2 jobs of this source"]
    )
    expect(page.locator("#concerns li").first).to_contain_text("It stays at its source")
    expect(page.locator("#differences tbody tr")).to_have_text([re.compile("Display.*VMware SVGA.*VGA.*no such card")])
    expect(page.locator("#problems")).to_be_hidden()
    press_until(page, ".bottom button:not([formaction])")
    page.keyboard.press("Enter")
    job = begun(service, page)
    assert job.name == "vm-erp"
    assert job.plan == MigrationPlan.model_validate(
        {
            "source": {"Live": "libvirt_remote"},
            "source_ref": {"kind": "live_vm", "source_id": source.id, "vm_id": "vm-erp"},
            "mode": "Warm",
            "name": "vm-erp",
            "warm": {"cutover": "manual"},
            "target": {
                "cpu_count": 4,
                "memory_bytes": 8 << 30,
                "network_map": [{"source": "", "target": "bridge:br0"}],
            },
        }
    )


def test_a_search_does_not_ask_the_platform_at_each_letter(page: Page, platform: FakePlatform, source: Source) -> None:
    page.goto(f"/new/source/{source.id}")
    expect(page.locator("#vms li")).to_have_count(6)
    platform.fault("unreachable", 1)
    page.locator("#f-search").press_sequentially("web", delay=300)
    expect(page.locator("#vms li")).to_have_count(4)
    page.fill("#f-search", "nothing like it")
    expect(page.locator("#vms .nothing")).to_contain_text("nothing like it")
    page.click("text=Ask the platform again")
    expect(page.locator(".banner.bad")).to_contain_text("E_MIG_SOURCE_UNREACHABLE")


def test_a_search_replaces_the_one_before_it_that_is_not_answered_yet(page: Page, source: Source) -> None:
    page.goto(f"/new/source/{source.id}")
    expect(page.locator("#vms li")).to_have_count(6)
    asked: list[Route] = []
    page.route("**/new/source/*", lambda route: asked.append(route) if not asked else route.continue_())
    with page.expect_request("**/new/source/*"):
        page.fill("#f-search", "nothing like it")
    page.fill("#f-search", "web")
    expect(page.locator("#vms li")).to_have_count(4)
    assert "search=web" in page.url
    asked[0].abort()
    expect(page.locator("#vms li")).to_have_count(4)


def test_a_warm_one_that_cannot_be_is_said_to_run_cold(page: Page, source: Source) -> None:
    page.goto(f"/new/machine?kind=live_vm&source_id={source.id}&vm_id=vm-mail")
    expect(page.locator("text=Cut over when I say")).to_be_hidden()
    page.check("[value=Warm]")
    expect(page.locator("text=Cut over when I say")).to_be_visible()
    expect(page.locator("#f-mode")).to_contain_text("It would run cold")
    page.click("text=How long it may be off")
    page.fill("#f-outage_budget", "300")
    page.check("[value=roll_back]")
    page.click("text=Review the plan")
    expect(page.locator("main")).to_contain_text("at most 5 min, then it is rolled back")
    expect(page.locator(".banner.note")).to_contain_text("It would run cold")
    expect(page.locator(".stations b")).to_have_text(["Queued", "Copying", "Starting", "Completed"])


def test_a_window_is_chosen_on_the_form(page: Page, service: Service, source: Source) -> None:
    times = {"start": "2020-01-01T22:00:00", "end": "2020-01-02T04:00:00", "rrule": "FREQ=DAILY"}
    service.store.windows.add(Window.model_validate({"id": "nights", "name": "Our nights", **times}))
    page.goto(f"/new/machine?kind=live_vm&source_id={source.id}&vm_id=vm-erp")
    page.check("[value=Warm]")
    page.select_option("#f-window", "nights")
    page.click("text=Review the plan")
    page.click("text=The request that is sent")
    expect(page.locator("pre")).to_contain_text('"window_id": "nights"')


def test_a_file_of_the_host_is_found_its_mistakes_reported_and_its_plan_changed(page: Page, service: Service) -> None:
    page.goto("/new/files")
    expect(page.locator(".files li")).to_have_count(4)
    expect(page.get_by_role("link", name="notes.txt")).to_have_count(0)
    page.click("text=exports & more")
    expect(page.locator(".crumbs [aria-current]")).to_have_text("exports & more")
    page.click("text=gateway.qcow2")
    expect(page.locator(".concerns li").first).to_be_visible()
    page.fill("#f-memory", "four")
    page.fill("#f-name", "gateway 2")
    page.click("text=Review the plan")
    expect(page.locator("#f-memory[aria-invalid=true]")).to_have_value("four")
    expect(page.locator("#m-memory")).to_have_text("Is not a size, such as 4 GiB or 512 MiB")
    page.click(".banner.bad a")
    page.fill("#f-memory", "1536 MiB")
    page.click("text=Review the plan")
    expect(page.locator("tr.changed")).to_have_count(2)
    page.click("text=Change it")
    expect(page.locator("#f-name")).to_have_value("gateway 2")
    expect(page.locator("#f-memory")).to_have_value("1536 MiB")
    page.uncheck("[name=start]")
    page.click("text=Review the plan")
    page.click("text=The request that is sent")
    expect(page.locator("pre")).to_contain_text('"start": false')
    page.click("text=Start the migration")
    job = begun(service, page)
    assert (job.name, job.plan.mode, job.plan.source.Offline) == ("gateway 2", Mode.COLD, "qcow2")
    assert job.plan.target.memory_bytes == 1536 << 20
    assert not job.plan.target.start


def machine_of(service: Service) -> str:
    return f"/new/machine?kind=offline_host_path&path={service.settings.imports_dir}/erp.ova"


def test_a_critical_concern_is_read_before_it_is_waived(page: Page, service: Service) -> None:
    page.goto(machine_of(service))
    page.select_option("#f-destination", "small")
    page.click("text=Review the plan")
    expect(page.locator(".concerns .bad")).to_contain_text("Disks do not fit")
    expect(page.locator("#m-waive")).to_be_visible()
    assert serious(page) == []
    page.check("[name=waive]")
    page.click("text=Review the plan")
    expect(page.locator(".banner.bad")).to_contain_text("You continue anyway")
    page.click("text=Start the migration")
    job = begun(service, page)
    assert job.plan.waive_concerns == ("target-too-small",)
    assert job.plan.target.destination == "small"


def test_a_plan_that_is_refused_comes_back_with_the_reason(page: Page, service: Service) -> None:
    before = len(service.begun)
    page.goto(machine_of(service))
    page.fill("#f-name", TAKEN)
    page.click("text=Review the plan")
    expect(page.locator("#problems li")).to_contain_text("Name: taken is the name of a guest here")
    expect(page.locator("#problems .hint")).to_have_text("choose another name")
    page.click("text=Start the migration")
    expect(page.locator(".banner.bad")).to_contain_text("has the name of the guest")
    expect(page.locator(".banner.bad .hint")).to_have_text("choose another name")
    expect(page.locator("#f-name")).to_have_value(TAKEN)
    assert len(service.begun) == before


def test_the_plan_of_a_failed_job_is_corrected_and_started_over(page: Page, service: Service, source: Source) -> None:
    plan = MigrationPlan.model_validate(
        {
            "source": {"Live": "libvirt_remote"},
            "source_ref": {"kind": "live_vm", "source_id": source.id, "vm_id": "vm-web-3"},
            "mode": "Warm",
            "target": {"cpu_count": 3, "network_map": [{"source": "", "target": "bridge:br0"}]},
        }
    )
    job = service.submit(plan)
    service.move(job.id, State.FAILED, error=failed())
    page.goto(f"/migrations/{job.id}")
    page.click("#correct")
    expect(page.locator("#f-cpu_count")).to_have_value("3")
    expect(page.locator("#f-network-1")).to_have_value("bridge:br0")
    page.fill("#f-cpu_count", "5")
    page.click("text=Review the plan")
    page.click("text=Start the migration")
    again = begun(service, page).plan
    assert (again.source_ref, again.mode) == (plan.source_ref, plan.mode)
    assert again.target == plan.target.model_copy(update={"cpu_count": 5})


def test_of_several_machines_in_a_file_one_is_chosen(page: Page) -> None:
    page.goto("/new/files")
    page.click("text=two.ova")
    buttons = page.locator("ul.picks button")
    expect(buttons).to_have_count(2)
    name = buttons.nth(1).inner_text()
    assert serious(page) == []
    buttons.nth(1).click()
    expect(page.locator("h1")).to_have_text(name)


def test_a_file_elsewhere_is_looked_into_and_its_password_shown_nowhere(page: Page, service: Service, tmp_path: Path) -> None:
    with nginx(tmp_path) as server:
        data = (service.settings.imports_dir / "exports & more" / "gateway.qcow2").read_bytes()
        (server.folder / "there.qcow2").write_bytes(data)
        page.goto("/new")
        page.fill("#f-url", "ftp://files.example/x.ova")
        page.click("text=Look inside")
        expect(page.locator("#m-url")).to_contain_text("url: is not of the form it must have")
        expect(page.locator("#f-url")).to_have_value("ftp://files.example/x.ova")
        page.fill("#f-url", f"{server.url.replace('/open/', '/private/')}there.qcow2")
        page.click("text=Credentials and certificate")
        page.fill("#f-username", USER_THERE)
        page.fill("#f-password", PASSWORD_THERE)
        answers: list[str] = []
        page.on(
            "response", lambda answer: answers.append(answer.text()) if answer.request.method == "POST" and answer.ok else None
        )
        page.click("text=Look inside")
        expect(page.locator("h1")).to_have_text("there")
        page.click("text=Review the plan")
        page.click("text=Change it")
        page.click("text=Review the plan")
        page.click("text=Start the migration")
        job = begun(service, page)
    assert job.plan.source_ref.kind == "remote_url"
    assert len(answers) >= 3
    assert not any(PASSWORD_THERE in text for text in [*answers, job.model_dump_json()])
    assert service.store.sealed(job.id) is not None


def test_it_works_without_javascript(browser: Browser, served: tuple[Service, str], source: Source) -> None:
    service, address = served
    with opened(browser, address, java_script_enabled=False) as context:
        page = context.new_page()
        page.goto("/new")
        page.click("text=rack 7")
        page.fill("#f-search", "web-2")
        page.click("text=Search")
        page.click("text=vm-web-2")
        page.fill("#f-cpu_count", "0")
        page.click("text=Review the plan")
        expect(page.locator("#m-cpu_count")).to_have_text("Must be 1 or more")
        page.fill("#f-cpu_count", "2")
        page.click("text=Review the plan")
        page.click("text=Start the migration")
        assert begun(service, page).plan.target.cpu_count == 2


def test_several_machines_of_a_source_become_a_job_each(page: Page, service: Service, source: Source) -> None:
    before = len(service.begun)
    page.goto(f"/new/several?source_id={source.id}" + "".join(f"&vm_id=vm-{number}" for number in range(51)))
    expect(page.locator(".banner.bad")).to_contain_text("51 machines were chosen")
    page.goto(f"/new/source/{source.id}")
    expect(page.get_by_role("button", name="Set up the chosen together")).to_be_hidden()
    for name in ("vm-erp", "vm-mail"):
        page.get_by_role("checkbox", name=f"Take {name}").check()
    # Those that a search does not find stay taken.
    page.fill("#f-search", "web")
    expect(page.locator("#vms li")).to_have_count(4)
    expect(page.locator(".ticked label")).to_have_text(["vm-erp", "vm-mail"])
    for name in ("vm-web-0", "vm-web-1"):
        page.get_by_role("checkbox", name=f"Take {name}").check()
    page.fill("#f-search", "")
    expect(page.locator("#vms li")).to_have_count(6)
    expect(page.locator("#vms [name=vm_id]:checked")).to_have_count(4)
    expect(page.get_by_role("link", name="Set up all 6 together")).to_be_visible()
    page.click("text=Set up the chosen together")
    expect(page.locator("h1")).to_have_text("4 machines")
    page.uncheck("[name=take][value=vm-web-0]")
    page.check("[value=Warm]")
    page.fill("#f-network-1", "bridge:br0")
    page.get_by_label("Processors of vm-erp").fill("none")
    page.get_by_label("Name of vm-mail").fill(TAKEN)
    page.click("text=Review the plans")
    expect(page.locator(".banner.bad")).to_contain_text("vm-erp: Processors: is not a whole number")
    assert serious(page) == []
    page.get_by_label("Processors of vm-erp").fill("6")
    page.click("text=Review the plans")
    expect(page.locator("tbody tr")).to_have_count(3)
    expect(page.locator("tbody tr").nth(0)).to_contain_text("Processors: 1 → 6")
    expect(page.locator("tbody tr").nth(1)).to_contain_text("cold")
    assert serious(page) == []
    page.click("text=Change them")
    expect(page.get_by_label("Processors of vm-erp")).to_have_value("6")
    expect(page.locator("[name=take][value=vm-web-0]")).not_to_be_checked()
    page.click("text=Review the plans")
    page.click("text=Start 3 migrations")
    # One is refused, and keeps no other from its job.
    expect(page.locator(".banner.bad")).to_contain_text("has the name of the guest")
    expect(page.locator("main .picks li")).to_have_text(["vm-erp", "vm-web-1"])
    assert serious(page) == []
    begun = [service.store.get(job_id) for job_id in service.begun[before:]]
    assert [(job.name, job.plan.mode, job.plan.target.cpu_count) for job in begun] == [
        ("vm-erp", Mode.WARM, 6),
        ("vm-web-1", Mode.WARM, None),
    ]
    assert {entry.target for job in begun for entry in job.plan.target.network_map} == {"bridge:br0"}


def test_several_machines_of_a_source_become_one_wave(page: Page, service: Service, source: Source) -> None:
    before = len(service.begun)
    page.goto(f"/new/several?source_id={source.id}&vm_id=vm-erp&vm_id=vm-web-1")
    page.check("[value=Warm]")
    page.click("text=Review the plans")
    look_at(page, "new-several-wave")
    page.fill("#f-wave_name", "november")
    page.fill("#f-window_start", "2030-11-28T22:00:00")
    page.fill("#f-window_end", "2030-11-29T04:00:00")
    page.get_by_role("button", name="Make a wave").click()
    expect(page.locator("#state")).to_have_text("Draft")
    expect(page.locator("#members tbody tr")).to_have_count(2)
    expect(page.locator(".opening")).to_contain_text("The window")
    assert len(service.begun) == before, "nothing moves before it goes"
    (made,) = service.waves.page(limit=5, cursor=None)[0]
    members = service.waves.whole(made.id).members
    assert [(one.vm, one.plan.mode, one.plan.source_ref.kind) for one in members] == [
        ("vm-erp", Mode.WARM, "live_vm"),
        ("vm-web-1", Mode.WARM, "live_vm"),
    ]
    service.waves.remove(made.id)


def test_a_question_of_a_source_becomes_one_wave(page: Page, service: Service, source: Source) -> None:
    page.goto("/waves/new")
    page.select_option("#f-source", label=source.name)
    page.fill("#f-wave-name", "webs")
    page.fill("#f-vm", "vm-wep-*")
    page.locator("#look").click()
    expect(page.locator("#query").get_by_role("alert")).to_contain_text("vm-wep-*")
    expect(page.locator("#f-wave-name")).to_have_value("webs")
    page.fill("#f-vm", "vm-web-*")
    page.fill("#f-budget", "soon")
    page.locator("#look").click()
    expect(page.locator("#query").get_by_role("alert")).to_contain_text("Outage allowed")
    page.fill("#f-budget", "600")
    page.locator("#look").click()
    expect(page.locator("#meant")).to_contain_text("4 VMs match")
    expect(page.locator("#meant")).to_contain_text("vm-web-0, vm-web-1")
    look_at(page, "wave-new-query")
    assert service.waves.page(limit=5, cursor=None)[0] == [], "to look makes nothing"
    page.locator("#make").click()
    expect(page.locator("#state")).to_have_text("Draft")
    (made,) = service.waves.page(limit=5, cursor=None)[0]
    members = service.waves.whole(made.id).members
    assert [(one.vm, one.outage_budget_s) for one in members] == [(f"vm-web-{number}", 600) for number in range(4)]
    service.waves.remove(made.id)


def test_a_stranger_gets_no_form_to_send(page: Page, service: Service) -> None:
    """A page that was made up, or is of a time before an upgrade."""
    before = len(service.begun)
    page.goto("/new")
    made_up: list[tuple[str, dict[str, str | float | bool]]] = [
        ("/new/submit", {"plan": "{}"}),
        ("/new/several/submit", {"plan": "{}"}),
        ("/new/several/review", {"source_id": "none", "vm_id": "x"}),
        ("/new/review", {"ref": "nonsense"}),
        ("/new/review", {"ref": '{"kind": "offline_host_path", "path": "/etc/passwd"}'}),
        ("/new/review", {"ref": '{"kind": "remote_url", "url": "http://127.0.0.1/x.ova"}', "sealed": "bm8="}),
    ]
    for path, form in made_up:
        answer = page.request.post(path, form=form, headers={"Sec-Fetch-Site": "same-origin"})
        assert answer.status == 400, path
        assert re.search(r"E_MIG_(BAD_REQUEST|HOST_PATH_REJECTED)", answer.text())
    assert page.request.post("/new/submit", form={}, headers={"Sec-Fetch-Site": "cross-site"}).status == 403
    assert len(service.begun) == before


@pytest.mark.timeout(180)
def test_it_can_be_read_by_everybody(page: Page, service: Service, source: Source) -> None:
    incoming = service.uploads.begin("web-01.ova")
    incoming.write(memoryview(bytes(4096)))
    upload = incoming.finish(None)
    shown = {
        "uploads": "/uploads",
        "uploads-remove": f"/uploads/{upload.id}/remove",
        "new": "/new",
        "new-vms": f"/new/source/{source.id}",
        "new-several": f"/new/several?source_id={source.id}&vm_id=vm-erp&vm_id=vm-mail&vm_id=vm-gone",
        "new-files": "/new/files",
        "new-machine": f"/new/machine?kind=live_vm&source_id={source.id}&vm_id=vm-erp",
        "new-concerns": machine_of(service),
    }
    for name, path in shown.items():
        page.goto(path)
        if name == "new-machine":
            page.check("[value=Warm]")
            page.click("text=How long it may be off")
        look_at(page, name)
    page.click("summary:text-is('More')")
    page.fill("#f-bandwidth", "fast")
    page.click("text=Review the plan")
    expect(page.locator("#m-bandwidth")).to_be_visible()
    look_at(page, "new-mistake")
    page.fill("#f-bandwidth", "100 MiB")
    page.click("text=Review the plan")
    expect(page.locator("tr.changed")).to_have_count(1)
    look_at(page, "new-review")
