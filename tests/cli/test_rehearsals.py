"""synvirt rehearse and rehearsals against a service whose rehearsals the test moves itself."""

import json
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from synvirt.cli.client import Client
from synvirt.errors import PersistFailed, ServiceUnreachable, SynvirtError
from synvirt.fleet.changing import change_members
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.machine import VmManifest
from synvirt.model.rehearsal import CheckResult, CommandCheck, PageCheck, PortCheck, Rehearsal, RehearsalState, RoleCheck
from synvirt.model.values import now
from tests.cli.conftest import Run
from tests.fakes.service import Service
from tests.fleet.made import member, wave
from tests.house import live_plan
from tests.running.processes import until

PICTURE = b"\x89PNG a screen"


def held(service: Service) -> Migration:
    job = service.submit(live_plan(warm={"cutover": "manual"}))
    service.move(job.id, State.COPYING_FULL)
    assert job.mode_effective is Mode.WARM
    return service.move(job.id, State.DELTA_SYNCING)


def move(service: Service, rehearsal_id: UUID, **changes: object) -> Rehearsal:
    rows = service.store.rehearsals
    return rows.change(rehearsal_id, rows.get(rehearsal_id).state, lambda found: found.model_copy(update=changes))


def passed(service: Service, rehearsal_id: UUID, *checks: CheckResult) -> None:
    good = all(check.ok for check in checks)
    move(
        service,
        rehearsal_id,
        state=RehearsalState.PASSED if good else RehearsalState.FAILED,
        moment=now(),
        started_at=now(),
        boot_s=12.0,
        outage_s=40.0,
        checks=checks,
    )


def test_a_rehearsal_is_waited_for_and_its_checks_are_shown(run: Run, service: Service) -> None:
    job = held(service)

    def go_on() -> None:
        until(lambda: service.store.rehearsals.of(job.id))
        found = service.store.rehearsals.of(job.id)[0]
        move(service, found.id, state=RehearsalState.BOOTING)
        passed(service, found.id, CheckResult(name="boot", ok=True, detail="seen by its agent, disks on virtio"))

    mover = threading.Thread(target=go_on)
    mover.start()
    done = run(
        "rehearse", str(job.id)[:8], "--check", "systemctl is-active 'my app'", "--port", 443, "--role", "dns", "--within", 9
    )
    mover.join()
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "ok   boot: seen by its agent, disks on virtio" in done.stdout
    assert "Outage of a cut-over at that time: 40 s" in done.stdout
    (found,) = service.store.rehearsals.of(job.id)
    assert found.asked.checks == (
        CommandCheck(kind="command", argv=("systemctl", "is-active", "my app"), within_s=9),
        PortCheck(kind="port", port=443, within_s=9),
        RoleCheck(kind="role", role="dns", within_s=9),
    )
    assert service.woken == [job.id]


@pytest.mark.parametrize("error", [PersistFailed, ServiceUnreachable])
def test_a_service_or_a_database_that_is_away_meanwhile_is_waited_for(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch, error: type[SynvirtError]
) -> None:
    """The rehearsal goes on, or is tidied up by the next start."""
    monkeypatch.setattr("synvirt.cli.client.RECONNECT_EVERY_S", 0)
    job, ask, away = held(service), Client.ask, list[str]()

    def away_once(client: Client, method: str, path: str, **options: Any) -> str:
        if not away and (found := service.store.rehearsals.of(job.id)) and path.endswith(str(found[0].id)):
            passed(service, found[0].id, CheckResult(name="boot", ok=True, detail="seen by its agent"))
            away.append(path)
            raise error("it is away")
        return ask(client, method, path, **options)

    monkeypatch.setattr(Client, "ask", away_once)
    done = run("rehearse", job.id)
    assert away
    assert (done.exit_code, done.stderr) == (0, ""), done.stdout + done.stderr
    assert "the service does not answer; waiting for it\n" in done.stdout


def test_several_are_rehearsed_together_each_with_its_own_checks(run: Run, service: Service) -> None:
    jobs = [held(service).id for _ in range(2)]
    for job_id in jobs:
        known = VmManifest(vm_id="vm", name="vm")
        service.store.change(job_id, State.DELTA_SYNCING, lambda job: job.model_copy(update={"manifest": known}))  # noqa: B023
    first, second = (str(one) for one in jobs)
    options = ["--role", f"{first}:postgresql", "--url", f"{second}:http://shop.example/health", "--within", 9]
    done = run("rehearsals", "together", first, second, *options, "--no-wait", "--json")
    assert done.exit_code == 0, done.stdout + done.stderr
    found = [service.store.rehearsals.of(one)[0] for one in jobs]
    assert [one.asked.checks for one in found] == [
        (RoleCheck(kind="role", role="postgresql", within_s=9),),
        (PageCheck(kind="http", url="http://shop.example/health", within_s=9),),
    ]
    assert found[0].together is not None
    assert found[0].together == found[1].together
    assert found[0].together.rehearsals == (found[0].id, found[1].id)
    again = run("rehearsals", "together", first, second)
    assert again.exit_code != 0
    assert "has not ended" in again.stdout + again.stderr
    for words in (["1f:80"], [f"{first}:eighty"]):
        assert run("rehearsals", "together", first, second, "--port", *words).exit_code == 2


def test_the_members_of_a_wave_are_rehearsed_together(run: Run, service: Service) -> None:
    jobs = [held(service).id for _ in range(2)]
    for job_id in jobs:
        known = VmManifest(vm_id="vm", name="vm")
        service.store.change(job_id, State.DELTA_SYNCING, lambda job: job.model_copy(update={"manifest": known}))  # noqa: B023
    made = service.waves.create(wave(member("shop", "db"), member("db", checks=({"kind": "port", "port": 5432},))))
    assert run("rehearsals", "together", "--wave", str(made.id)[:8]).exit_code == 1, "none of them copies yet"
    for one, job_id in zip(service.waves.whole(made.id).members, jobs, strict=True):
        change_members(service.store.waves, made.id, [one], {one.state}, {"job_id": job_id})
    done = run("rehearsals", "together", "--wave", str(made.id)[:8], "--no-wait", "--json")
    assert done.exit_code == 0, done.stdout + done.stderr
    shop, database = (service.store.rehearsals.of(one)[0] for one in jobs)
    assert [one["id"] for one in json.loads(done.stdout)["items"]] == [str(database.id), str(shop.id)]
    assert database.asked.checks == (PortCheck(kind="port", port=5432),)


def test_one_that_failed_is_an_exit_code(run: Run, service: Service) -> None:
    job = held(service)

    def go_on() -> None:
        until(lambda: service.store.rehearsals.of(job.id))
        passed(service, service.store.rehearsals.of(job.id)[0].id, CheckResult(name="true", ok=False, detail="it ended with 1"))

    mover = threading.Thread(target=go_on)
    mover.start()
    done = run("rehearse", job.id, "--json")
    mover.join()
    assert done.exit_code == 1
    assert json.loads(done.stdout)["state"] == "Failed"


def test_listed_shown_cancelled(run: Run, service: Service, tmp_path: Path) -> None:
    job = held(service)
    assert "never rehearsed" in run("rehearsals", "list", job.id).stdout
    begun = run("rehearse", job.id, "--no-wait")
    assert "waits for its clones" in begun.stdout
    found = service.store.rehearsals.of(job.id)[0]
    short = str(found.id)[:8]
    assert "It ends when everything" in run("rehearsals", "cancel", job.id, short).stdout
    assert service.store.rehearsals.is_cancelled(found.id)
    passed(service, found.id, CheckResult(name="boot", ok=True, detail="seen"), CheckResult(name="x", ok=False, detail="no"))
    assert "1 of 2" in run("rehearsals", "list", job.id).stdout
    assert "BAD  x: no" in run("rehearsals", "show", job.id, short).stdout
    assert json.loads(run("rehearsals", "show", job.id, short, "--json").stdout)["id"] == str(found.id)
    assert run("rehearsals", "cancel", job.id, found.id).exit_code == 1
    picture = tmp_path / "screen.png"
    assert run("rehearsals", "screenshot", job.id, found.id, picture).exit_code == 1
    service.screenshots[found.id] = PICTURE
    assert run("rehearsals", "screenshot", job.id, found.id, picture).exit_code == 0
    assert picture.read_bytes() == PICTURE


def test_a_role_that_nobody_knows_is_said_with_those_that_are_known(run: Run, service: Service) -> None:
    done = run("rehearse", held(service).id, "--role", "postman")
    assert done.exit_code == 2
    assert "postgresql" in done.stderr


def test_why_a_job_cannot_be_rehearsed_is_said(run: Run, service: Service) -> None:
    job = service.submit(live_plan("Cold"))
    done = run("rehearse", job.id)
    assert done.exit_code == 1
    assert "it copies cold" in done.stderr


def test_who_stops_waiting_is_told_that_the_rehearsals_go_on(
    run: Run, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("synvirt.cli.rehearsals._until_its_end", interrupted)
    known = VmManifest(vm_id="vm", name="vm")
    for command, count in ((["rehearse"], 1), (["rehearse", "--json"], 1), (["rehearsals", "together"], 2)):
        jobs = [held(service).id for _ in range(count)]
        for job_id in jobs:
            service.store.change(job_id, State.DELTA_SYNCING, lambda one: one.model_copy(update={"manifest": known}))
        done = run(*command, *jobs)
        told = done.stderr if "--json" in command else done.stdout
        assert done.exit_code == 130
        for job_id in jobs:
            (found,) = service.store.rehearsals.of(job_id)
            assert f"synvirt rehearsals show {job_id} {found.id}" in told
            assert f"synvirt rehearsals cancel {job_id} {found.id}" in told
