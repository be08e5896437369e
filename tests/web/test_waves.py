"""The pages of waves: what each member waits for, what can be requested, and that names of strangers stay text."""

import json
from typing import Any
from uuid import UUID, uuid4

from playwright.sync_api import Page, expect

from synvirt.fleet.changing import change_members
from synvirt.fleet.model import MemberState, Wave, WaveRequest
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.rehearsal import RehearsalState
from synvirt.model.values import now
from tests.fakes.service import PLAN, PREFIX, Service
from tests.fleet.made import plan
from tests.web import jobs
from tests.web.conftest import look_at

NIGHT = {
    "id": "night",
    "name": "Saturday night",
    "start": "2020-01-01T22:00:00",
    "end": "2020-01-02T21:00:00",
    "rrule": "FREQ=DAILY",
}
OVER = {"id": "over", "name": "Last year", "start": "2020-01-01T22:00:00", "end": "2020-01-02T04:00:00"}


def body(*names: str, **more: Any) -> dict[str, Any]:
    members = [{"id": name, "vm": f"VM {name}", "plan": json.loads(plan(name).model_dump_json())} for name in names]
    return {"name": "november", "members": members, "windows": [NIGHT, OVER], **more}


def made(service: Service, *names: str, **more: Any) -> Wave:
    return service.waves.create(WaveRequest.model_validate_json(json.dumps(body(*names, **more))))


def set_member(service: Service, wave: Wave, name: str, **fields: Any) -> None:
    (member,) = [one for one in service.waves.whole(wave.id).members if one.id == name]
    assert change_members(service.store.waves, wave.id, [member], {member.state}, fields, submitted="job_id" in fields) == [
        name
    ]


def test_an_operator_leads_a_wave_through_its_night(page: Page, service: Service) -> None:
    wave = made(service, "db01", "web01", "web02", canary={"count": 1, "gate": "approval"})
    job = Migration(id=UUID(int=77), name="db", plan=PLAN, state=State.FAILED, mode_effective=Mode.COLD, created_at=now())
    service.store.add(job, host="local")
    page.goto("/")
    page.get_by_role("link", name="Waves").click()
    expect(page.locator(f"#wave-{wave.id}")).to_contain_text("3 waiting")
    look_at(page, "waves")
    page.get_by_role("link", name="november").click()
    expect(page.locator("#state")).to_have_text("Draft")
    openings = page.locator(".opening")
    expect(openings).to_have_count(2)
    expect(openings.nth(0)).to_contain_text("Saturday night")
    expect(openings.nth(1)).to_contain_text("does not open again")
    page.locator("#ask-go").click()
    page.get_by_role("button", name="Yes: go").click()
    expect(page.locator("#state")).to_have_text("Running")
    # What happens meanwhile is on the page without a reload.
    set_member(service, wave, "db01", state=MemberState.FAILED, job_id=job.id, cause="its disk is full", outage_s=75.0)
    service.store.waves.put_reasons(wave.id, {"web01": "It waits for the canary."})
    expect(page.locator("#member-db01")).to_contain_text("its disk is full")
    expect(page.locator("#member-db01")).to_contain_text("1 min 15 s")
    expect(page.locator("#job-db01")).to_have_attribute("href", f"/migrations/{job.id}")
    expect(page.locator("#roll-back-db01")).to_have_count(1)
    expect(page.locator("#member-web01")).to_contain_text("It waits for the canary.")
    look_at(page, "wave")
    page.get_by_role("link", name="Report").click()
    expect(page.get_by_role("heading", name="november")).to_have_count(1)
    expect(page.locator("body")).to_contain_text("its disk is full")
    page.go_back()
    page.locator("#ask-retry").click()
    page.get_by_role("button", name="Yes: retry all that failed").click()
    expect(page.locator("#member-db01 .pill")).to_have_text("Waiting")
    expect(page.locator("#ask-retry")).to_have_count(0)
    page.locator("#skip-web02").click()
    page.get_by_role("link", name="No, back").click()
    page.locator("#skip-web02").click()
    page.get_by_role("button", name="Yes: skip").click()
    expect(page.locator("#member-web02 .pill")).to_have_text("Skipped")
    page.locator("#only-skipped").click()
    expect(page.locator("tbody tr")).to_have_count(1)
    page.locator("#ask-canary").click()
    page.get_by_role("button", name="Yes: approve the canary").click()
    expect(page.locator("#ask-canary")).to_have_count(0)
    page.locator("#ask-hold").click()
    page.get_by_role("button", name="Yes: hold").click()
    expect(page.get_by_role("status")).to_contain_text("It was held by")
    page.locator("#ask-cancel").click()
    page.get_by_role("button", name="Yes: cancel").click()
    expect(page.locator("#state")).to_have_text("Cancelled")
    page.locator("#ask-remove").click()
    page.get_by_role("button", name="Yes: remove").click()
    expect(page.locator(f"#wave-{wave.id}")).to_have_count(0)
    entries, _ = service.store.audit.page(limit=50)
    requested = {entry.resource for entry in entries}
    assert {f"/waves/{wave.id}/{name}" for name in ("go", "hold", "canary", "cancel", "remove")} <= requested


def test_a_cause_without_a_gap_leaves_the_other_columns_in_sight(page: Page, service: Service) -> None:
    wave = made(service, "sap")
    set_member(
        service, wave, "sap", state=MemberState.FAILED, cause=f"{'DATABASE_NODE_' * 12}/{'DATABASE_NODE_' * 12}.vmdk: broken"
    )
    page.set_viewport_size({"width": 1280, "height": 844})
    page.goto(f"/waves/{wave.id}")
    hidden = page.locator(".wide:has(#member-sap)").evaluate("wide => wide.scrollWidth - wide.clientWidth")
    assert hidden <= 0


def test_a_word_is_given_for_one_member(page: Page, service: Service) -> None:
    document = body("a", "b")
    for one in document["members"]:
        one["approvers"] = ["R&D <team>"]
    wave = service.waves.create(WaveRequest.model_validate_json(json.dumps(document)))
    page.goto(f"/waves/{wave.id}")
    page.locator("#approve-1-a").click()
    expect(page.locator("main")).to_contain_text("The approver is R&D <team>.")
    page.get_by_role("button", name="Yes: approve").click()
    expect(page.locator("#approve-1-a")).to_have_count(0)
    expect(page.locator("#approve-1-b")).to_have_text("Word of R&D <team>")
    given = service.waves.whole(wave.id).members
    assert [[one.approver for one in member.approvals] for member in given] == [["R&D <team>"], []]


def test_the_guests_of_a_wave_are_rehearsed_together(page: Page, service: Service) -> None:
    wave = made(service, "shop", "db", "mail", "lost")
    set_member(service, wave, "shop", state=MemberState.SYNCING, job_id=jobs.warm(service, "together-shop"))
    cold = jobs.added(service, "cold", (State.COPYING_FULL, 9))
    set_member(service, wave, "mail", state=MemberState.SYNCING, job_id=cold)
    refused = {"state": MemberState.FAILED, "job_id": uuid4(), "cause": "its plan was refused"}
    (lost,) = [one for one in service.waves.whole(wave.id).members if one.id == "lost"]
    assert change_members(service.store.waves, wave.id, [lost], {lost.state}, refused) == ["lost"]
    page.goto(f"/waves/{wave.id}")
    expect(page.locator("#ask-rehearse")).to_have_count(0)  # it copies nothing yet
    service.waves.go(wave.id)
    page.reload()
    expect(page.locator("#ask-hold")).to_have_count(1)
    expect(page.locator("#ask-rehearse")).to_have_count(0)  # one alone copies warm
    set_member(service, wave, "db", state=MemberState.SYNCING, job_id=jobs.warm(service, "together-db"))
    page.reload()
    page.locator("#ask-rehearse").click()
    expect(page.locator("main")).to_contain_text("in one isolated network")
    page.get_by_role("button", name="Yes: rehearse together").click()
    expect(page.locator("#member-db")).to_contain_text("Rehearsal waiting for the end of a pass")
    expect(page.locator("#member-mail")).not_to_contain_text("Rehearsal")
    expect(page.locator("#member-lost")).to_contain_text("its plan was refused")
    expect(page.locator("#job-db")).to_have_count(1)
    expect(page.locator("#job-lost")).to_have_count(0)
    found = [service.store.rehearsals.of(job_id)[0] for job_id in wave_jobs(service, wave) if job_id != cold]
    assert found[0].together is not None
    assert found[0].together == found[1].together
    done = {"state": RehearsalState.PASSED, "finished_at": now()}
    service.store.rehearsals.change(found[0].id, found[0].state, lambda one: one.model_copy(update=done))
    expect(page.locator("#member-shop")).to_contain_text("Rehearsal passed")
    look_at(page, "wave-rehearsed")
    page.locator("#rehearsed-shop").click()
    expect(page.locator("#rehearsals .pill")).to_have_text("Passed")


def wave_jobs(service: Service, wave: Wave) -> list[UUID]:
    known = [one.job_id for one in service.waves.whole(wave.id).members if one.state is not MemberState.FAILED]
    return [job_id for job_id in known if job_id is not None]


def test_a_forecast_is_drawn_and_kept(page: Page, service: Service) -> None:
    document = body("a", "b")
    document["members"][1]["vm"] = "<img src=x onerror=alert(1)>"
    wave = service.waves.create(WaveRequest.model_validate_json(json.dumps(document)))
    page.goto(f"/waves/{wave.id}")
    page.get_by_role("button", name="Forecast").click()
    expect(page.locator("svg.gantt text").filter(has_text="p95 ")).to_have_count(1)
    expect(page.locator("tbody tr")).to_have_count(2)
    expect(page.get_by_role("status")).to_contain_text("The size of 2 members is not known")
    look_at(page, "wave-forecast")
    page.get_by_role("link", name="Back to the wave").click()
    expect(page.locator("#counts")).to_contain_text("Bottleneck:")
    assert page.locator("#members img").count() == 0
    drawn = page.request.post(f"{PREFIX.rsplit('/', 1)[0]}/waves/{wave.id}/simulate?format=svg", data={})
    assert (drawn.status, drawn.headers["content-type"]) == (200, "image/svg+xml")
    assert drawn.text().startswith("<svg ")


def test_a_large_wave_is_shown_a_page_at_a_time(page: Page, service: Service) -> None:
    wave = made(service, *(f"vm{number:03}" for number in range(250)))
    page.goto(f"/waves/{wave.id}")
    expect(page.locator("tbody tr")).to_have_count(200)
    page.get_by_role("link", name="More").click()
    expect(page.locator("tbody tr")).to_have_count(50)
    expect(page.locator("#member-vm249")).to_have_count(1)
    page.get_by_role("link", name="First").click()
    expect(page.locator("#member-vm000")).to_have_count(1)
    assert page.request.get("/waves/00000000-0000-0000-0000-000000000000").status == 404
    assert page.request.get(f"/waves/{wave.id}/fly").status == 404


def chosen_file(page: Page, name: str, content: bytes) -> None:
    page.locator("#f-file").set_input_files({"name": name, "mimeType": "application/octet-stream", "buffer": content})
    page.get_by_role("button", name="Make a draft", exact=True).click()


def test_a_wave_is_made_of_a_file_and_what_is_wrong_with_its_rows_is_listed(page: Page, service: Service) -> None:
    before = service.waves.page(limit=100, cursor=None)[0]
    page.goto("/waves")
    page.locator("#new-wave").click()
    chosen_file(page, "fleet <b>.csv", b"id,vm,depends_on,priority\nweb,<i>nowhere</i>,db,1\nmail,lost,,seven\n")
    rows = page.locator("#problems tbody tr")
    expect(rows.filter(has_text="seven")).to_contain_text("priority")
    expect(rows.filter(has_text="<i>nowhere</i>").first).to_contain_text("2")
    expect(page.get_by_role("alert")).to_contain_text("Nothing was made of fleet <b>.csv")
    look_at(page, "wave-new")
    chosen_file(page, "broken.json", b'{"name": 5')
    expect(page.locator("#problems tbody tr")).to_have_count(1)
    chosen_file(page, "empty.csv", b"")
    expect(page.locator("#problems tbody tr")).to_contain_text("the file is empty")
    assert service.waves.page(limit=100, cursor=None)[0] == before, "nothing is taken in by half"
    chosen_file(page, "november.json", json.dumps(body("a", "b")).encode())
    expect(page.locator("#state")).to_have_text("Draft")
    expect(page.locator("#member-b")).to_have_count(1)
    refused = page.request.post(
        "/waves/new/file", data="x", headers={"Content-Type": "text/csv", "Sec-Fetch-Site": "same-origin"}
    )
    assert refused.status == 415


def test_other_numbers_are_tried_before_a_wave_goes(page: Page, service: Service) -> None:
    wave = made(service, "a", "b", limits={"per_source_host": 1})
    page.goto(f"/waves/{wave.id}")
    page.get_by_role("button", name="Forecast").click()
    expect(page.locator("#difference")).to_have_count(0)
    kept = service.waves.summary(wave.id).forecast
    page.fill("#f-per_source_host", "2")
    page.fill("#f-source_host_bps", "2 GiB")
    page.get_by_role("button", name="Try it").click()
    expect(page.locator("#difference")).to_contain_text("the wave and its forecast stay as they are")
    expect(page.locator("#f-per_source_host")).to_have_value("2")
    look_at(page, "wave-what-if")
    assert service.waves.summary(wave.id).forecast == kept
    page.fill("#f-per_source_host", "many")
    page.get_by_role("button", name="Try it").click()
    expect(page.locator("main")).to_contain_text("limits.per_source_host")
    page.goto(f"/waves/{wave.id}")
    page.locator("#ask-go").click()
    page.get_by_role("button", name="Yes: go").click()
    expect(page.locator("#state")).to_have_text("Running")


def test_the_page_of_a_wave_follows_what_others_begin_and_what_its_end_sends(page: Page, service: Service) -> None:
    wave = made(service, "a", hooks=[{"url": "https://ops.example/hidden", "secret": "s" * 16}])
    page.goto(f"/waves/{wave.id}")
    expect(page.locator("#state")).to_have_text("Draft")
    service.waves.go(wave.id)
    expect(page.locator("#state")).to_have_text("Running")
    service.waves.cancel(wave.id)
    expect(page.locator("#state")).to_have_text("Cancelled")
    while owed := service.store.wave_hooks.due(limit=5):
        for one in owed:
            service.store.wave_hooks.settle(one.number, state="delivered", answer="200")
    expect(page.locator("#deliveries .pill.busy")).to_have_count(0)
    expect(page.locator("#deliveries .pill.good").first).to_have_text("Delivered")
    expect(page.locator("#wave[hx-get]")).to_have_count(0)


def test_what_is_sent_to_webhooks_is_on_the_page(page: Page, service: Service) -> None:
    wave = made(service, "a", hooks=[{"url": "https://ops.example/hidden", "secret": "s" * 16}])
    page.goto(f"/waves/{wave.id}")
    expect(page.locator("main")).to_contain_text("Nothing was sent to its 1 webhook yet")
    service.waves.go(wave.id)
    (owed,) = service.store.wave_hooks.due(limit=5)
    service.store.wave_hooks.settle(owed.number, state="given_up", answer="ops.example answers 404")
    page.goto(f"/waves/{wave.id}")
    row = page.locator(f"#delivery-{owed.number}")
    expect(row).to_contain_text("ops.example answers 404")
    expect(row).to_contain_text("https://ops.example")
    look_at(page, "wave-webhooks")
    service.waves.cancel(wave.id)
