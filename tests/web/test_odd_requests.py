"""What a browser of our pages does not send, and what a page meets in the store and at a source: answers, and no incident."""

import json
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import httpx
import pytest
from sqlalchemy import text

from synvirt.fleet.model import WaveRequest
from synvirt.model.job import Progress
from synvirt.model.kinds import LiveKind, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.sources import SourceRequest
from tests.fakes.live import FakePlatform
from tests.fakes.platforms import with_fake
from tests.fakes.service import PLAN, Service
from tests.fleet.made import member
from tests.web import jobs

SITE = "http://synvirt"
OUT_OF_THREADS = "no-thread"


def check(plan: MigrationPlan) -> None:
    if plan.name == OUT_OF_THREADS:
        raise RuntimeError("can't start new thread")


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder: Path = tmp_path_factory.mktemp("web")
    platform = FakePlatform(folder / "platform")
    platform.add_vm("vm-here", {"boot": bytes(4096)})
    made = Service(folder / "data", platforms=with_fake(platform), check=check)
    with made.served():
        yield made
    made.close()


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with service.local() as client:
        yield client


def test_an_event_that_cannot_be_read_ends_no_live_list(service: Service, client: httpx.Client) -> None:
    newest = service.store.last_event_id()
    damaged = jobs.added(service, "damaged", (State.QUEUED, 9))
    with service.store._engine.begin() as db:
        db.execute(text("UPDATE events SET document = '{}' WHERE migration_id = :id"), {"id": str(damaged)})
    whole = jobs.added(service, "whole", (State.QUEUED, 9))
    with client.stream("GET", f"{SITE}/events", params={"after": newest}) as stream:
        for line in stream.iter_lines():
            if f"job-{whole}" in line:
                break


def test_the_page_of_a_job_that_is_removed_meanwhile_closes_its_stream(service: Service, client: httpx.Client) -> None:
    """A browser would connect again, and say that the service does not answer."""
    job = service.submit()
    with client.stream("GET", f"{SITE}/migrations/{job.id}/events") as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line == "event: part")
        service.move(job.id, State.COMPLETED)
        service.store.remove(job.id)
        assert [line for line in lines if line][-2:] == ["event: ended", "data: ended"]


def test_the_list_and_the_page_of_a_job_whose_host_is_lost_show_no_rate(service: Service, client: httpx.Client) -> None:
    service.store.hosts.begin("gone", ttl_s=-5, document="{}")
    progress = Progress(bytes_total=100 << 20, bytes_done=50 << 20, rate_bps=7 << 20, eta_s=7)
    job = service.submit().model_copy(update={"id": uuid4(), "host": "gone", "state": State.COPYING_FULL, "progress": progress})
    service.store.add(job, host="gone")
    for path in ("/", f"/migrations/{job.id}"):
        shown = client.get(f"{SITE}{path}").text
        assert "50 %" in shown or "50.0 MiB" in shown
        assert "7.0 MiB/s" not in shown, path


def test_one_host_alone_looks_for_no_figures_of_others(service: Service) -> None:
    assert service.intake.figures_elsewhere is None


def test_a_job_of_a_lost_host_has_no_rate(service: Service) -> None:
    service.store.hosts.begin("kvm2", ttl_s=600, document="{}")
    progress = Progress(bytes_total=9, bytes_done=3, rate_bps=2.0, eta_s=3.0)
    job = jobs.added(service, "elsewhere", (State.COPYING_FULL, 9), host="kvm2", progress=progress)
    assert service.store.slots.take(job, {"a disk": 1}, host="kvm2")
    assert service.intake._figures_elsewhere()[job] == (State.COPYING_FULL, progress)
    service.store.hosts.fence("kvm2")
    assert service.intake._figures_elsewhere()[job] == (State.COPYING_FULL, progress.stopped())


def test_places_and_names_that_no_wave_has_are_refused(service: Service, client: httpx.Client) -> None:
    wave = service.waves.create(WaveRequest(name="night", members=(member("a", approvers=("Alice",)),)))
    url = f"{SITE}/waves/{wave.id}"
    assert client.get(url, params={"after": 10**30}).status_code == 400
    for name in ("%00", "%20", "x" * 65):
        assert client.get(f"{url}/members/{name}/skip").status_code == 404
        assert client.post(f"{url}/members/{name}/skip", data={"x": "y"}).status_code == 404
    for approver in ("", "x" * 256, "a\x00b"):
        answer = client.post(f"{url}/members/a/approve", data={"approver": approver})
        assert (answer.status_code, "E_MIG_BAD_REQUEST" in answer.text) == (400, True), answer.text


@pytest.mark.parametrize("name", ["a\tb\x1bc.csv", "\u202egpj.csv", "n" * 400 + ".csv", ".csv"])
def test_a_wave_may_be_named_after_any_file(service: Service, client: httpx.Client, name: str) -> None:
    document = json.loads(member("a").plan.model_dump_json())
    sheet = 'id,vm,plan\na,x,"' + json.dumps(document).replace('"', '""') + '"\n'
    answer = client.post(f"{SITE}/waves/new/file", files={"file": (name, sheet.encode())})
    assert answer.status_code == 303, answer.text
    (made, *_) = service.waves.page(limit=1, cursor=None)[0]
    assert made.name.isprintable()


def test_of_several_machines_none_is_left_out_that_was_chosen(service: Service, client: httpx.Client) -> None:
    request = SourceRequest(name="rack", kind=LiveKind.LIBVIRT_REMOTE, endpoint="qemu+ssh://root@10.0.0.7/system")
    source = service.sources.add(request)
    form = {"source_id": str(source.id), "vm_id": ["vm-here", "vm-gone"], "take": ["vm-here", "vm-gone"], "mode": "Cold"}
    answer = client.post(f"{SITE}/new/several/review", data=form)
    assert answer.status_code == 400
    assert "vm-gone</a>: Machines: it cannot be inspected now" in answer.text
    assert 'value="vm-gone" checked' in answer.text
    assert client.post(f"{SITE}/new/several/review", data=form | {"take": ["vm-here"]}).status_code == 200


def test_of_several_plans_each_is_begun_and_none_is_no_answer(service: Service, client: httpx.Client) -> None:
    before = len(service.begun)
    plans = [PLAN.model_copy(update={"name": name}).model_dump_json() for name in ("one", OUT_OF_THREADS, "two")]
    answer = client.post(f"{SITE}/new/several/submit", data={"plan": plans})
    assert answer.status_code == 500
    assert "E_MIG_INTERNAL" in answer.text
    assert [service.store.get(job_id).name for job_id in service.begun[before:]] == ["one", "two"]
    assert client.post(f"{SITE}/new/several/submit", data={"other": "x"}).status_code == 400
