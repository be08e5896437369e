"""The endpoints of /migrations, as the contract has them."""

import asyncio
import json
from typing import Any
from uuid import UUID

import httpx
import pytest

from synvirt.api.routes.migrations import JOBS_A_PIECE, page
from synvirt.jobs.board import Board
from synvirt.model.job import DiskProgress, Migration, Progress
from synvirt.model.kinds import LiveKind, Mode, State
from synvirt.model.plan import LiveVmRef, PlanSource, Warm
from synvirt.model.repair import Repair
from tests.fakes.service import PLAN, PREFIX, Service

OFFLINE: dict[str, Any] = {
    "source": {"Offline": "ova_archive"},
    "source_ref": {"kind": "offline_host_path", "path": "/imports/web.ova"},
    "mode": "Cold",
}
LIVE: dict[str, Any] = {
    "source": {"Live": "vim_api"},
    "source_ref": {"kind": "live_vm", "source_id": str(UUID(int=7)), "vm_id": "vm-17"},
    "mode": "Warm",
}


@pytest.mark.parametrize("plan", [OFFLINE, LIVE, {**LIVE, "name": "web", "warm": {"cutover": "manual", "interval_s": 60}}])
def test_a_plan_becomes_a_queued_job(service: Service, client: httpx.Client, plan: dict[str, Any]) -> None:
    response = client.post("/migrations", json={"plan": plan})
    job = Migration.model_validate(response.json())
    assert (response.status_code, job.state, job.mode_effective) == (201, State.QUEUED, plan["mode"])
    assert response.headers["Location"] == f"{PREFIX}/migrations/{job.id}"
    assert response.headers["Content-Type"] == "application/json"
    assert response.json()["plan"]["source"] == plan["source"]
    assert service.begun == [job.id]
    assert client.get(f"http://synvirt{response.headers['Location']}").json() == response.json()


def test_json_has_one_kind_of_number(service: Service, client: httpx.Client) -> None:
    plan = {**OFFLINE, "target": {"cpu_count": 4.0, "memory_bytes": 1e9}}
    job = client.post("/migrations", json={"plan": plan}).json()
    assert (job["plan"]["target"]["cpu_count"], job["plan"]["target"]["memory_bytes"]) == (4, 1_000_000_000)


def test_a_load_shows_the_progress_of_now(service: Service, client: httpx.Client) -> None:
    job = service.submit()
    service.move(job.id, State.COPYING_FULL)
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_total=100, bytes_done=40))
    for answer in (client.get(f"/migrations/{job.id}").json(), client.get("/migrations").json()["items"][0]):
        assert (answer["state"], answer["progress"]["bytes_done"]) == ("CopyingFull", 40)


def test_the_rows_of_disks_are_of_now_too(service: Service, client: httpx.Client) -> None:
    """The stored ones are as old as the last flush."""
    job = service.submit()
    service.move(job.id, State.COPYING_FULL)
    row = DiskProgress(key="a", label="a", state="copying", bytes_total=100, bytes_done=40, volume="a-1")
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_total=100, bytes_done=40), (row,))
    for answer in (client.get(f"/migrations/{job.id}").json(), client.get("/migrations").json()["items"][0]):
        assert answer["disks"] == [row.model_dump(mode="json")]
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_total=100, bytes_done=100))
    assert client.get(f"/migrations/{job.id}").json()["disks"] == [], "then those of the document are"


def test_a_figure_of_the_state_before_is_not_shown(service: Service, client: httpx.Client) -> None:
    job = service.submit()
    service.board.pin(job.id, State.COPYING_FULL, Progress(bytes_total=100, bytes_done=40))
    assert client.get(f"/migrations/{job.id}").json()["progress"]["bytes_done"] == 0


def test_the_list_is_newest_first_in_pages(service: Service, client: httpx.Client) -> None:
    jobs = [str(service.submit().id) for _ in range(5)]
    seen: list[str] = []
    cursor: str | None = None
    sizes = []
    while True:
        answer = client.get("/migrations", params={"limit": 2} | ({"cursor": cursor} if cursor else {})).json()
        sizes.append(len(answer["items"]))
        seen += [item["id"] for item in answer["items"]]
        cursor = answer["next_cursor"]
        if cursor is None:
            break
    assert (seen, sizes) == (jobs[::-1], [2, 2, 1])
    assert [item["id"] for item in client.get("/migrations").json()["items"]] == jobs[::-1]


def test_an_empty_list(client: httpx.Client) -> None:
    assert client.get("/migrations").json() == {"items": [], "next_cursor": None}


def test_the_list_joins_documents_unread() -> None:
    """What makes a list of thousands quick: a document that is not running is passed on as it is, even were it no JSON."""
    running = UUID(int=5)
    board = Board()
    board.pin(running, State.COPYING_FULL, Progress())
    assert _joined(["<not parsed>", "<nor this>"], 7, board) == b'{"items":[<not parsed>,<nor this>],"next_cursor":"7"}'


def test_a_running_job_that_cannot_be_read_breaks_no_list() -> None:
    """A later version has it, on another host, which is lost."""
    job_id = UUID(int=5)
    board = Board()
    board.pin(job_id, State.COPYING_FULL, Progress())
    later = f'{{"id":"{job_id}","state":"Paused"}}'
    assert _joined(["<another>", later], None, board) == f'{{"items":[<another>,{later}],"next_cursor":null}}'.encode()


@pytest.mark.parametrize("count", [0, 1, JOBS_A_PIECE - 1, JOBS_A_PIECE, JOBS_A_PIECE + 1, 5 * JOBS_A_PIECE])
def test_the_pieces_of_a_list_fit(count: int) -> None:
    answer = json.loads(_joined([str(number) for number in range(count)], None, Board()))
    assert answer == {"items": list(range(count)), "next_cursor": None}


def _joined(documents: list[str], following: int | None, board: Board) -> bytes:
    async def join() -> bytes:
        return b"".join([piece async for piece in page(documents, following, board, frozenset())])

    return asyncio.run(join())


def test_a_document_begins_with_its_id(service: Service) -> None:
    """The list finds running jobs by their place in the text."""
    job = service.submit()
    documents, _ = service.store.documents(limit=1)
    assert documents[0][7:43] == str(job.id)


@pytest.mark.parametrize(
    "query", ["limit=0", "limit=5001", "limit=x", "cursor=x", "cursor=0", "cursor=-1", "cursor=9999999999999999999"]
)
def test_a_wrong_page_is_refused(refusing: httpx.Client, query: str) -> None:
    response = refusing.get(f"/migrations?{query}")
    assert (response.status_code, response.json()["code"]) == (400, "E_MIG_BAD_REQUEST")
    assert query.split("=", maxsplit=1)[0] in response.json()["detail"]


def test_cancel_asks_and_a_second_cancel_asks_the_same(service: Service, client: httpx.Client) -> None:
    job = service.submit()
    for _ in range(2):
        response = client.post(f"/migrations/{job.id}/cancel")
        assert (response.status_code, response.json()["id"]) == (202, str(job.id))
    assert service.store.cancel_requested(job.id)
    assert service.woken == [job.id, job.id]


@pytest.mark.parametrize("end", [State.COMPLETED, State.FAILED, State.CANCELLED])
def test_what_has_ended_cannot_be_cancelled(service: Service, client: httpx.Client, end: State) -> None:
    job = service.submit()
    service.move(job.id, end)
    response = client.post(f"/migrations/{job.id}/cancel")
    assert (response.status_code, response.json()["code"]) == (409, "E_MIG_CONFLICT")
    assert str(end) in response.json()["detail"]


def test_cutover_is_for_a_job_that_waits_for_it(service: Service, client: httpx.Client) -> None:
    warm = PLAN.model_copy(
        update={
            "source": PlanSource(Live=LiveKind.VIM_API),
            "source_ref": LiveVmRef(kind="live_vm", source_id=UUID(int=7), vm_id="vm-1"),
            "mode": Mode.WARM,
            "warm": Warm(cutover="manual"),
        }
    )
    job = service.submit(warm)
    assert client.post(f"/migrations/{job.id}/cutover").status_code == 202
    assert service.store.cutover_requested(job.id)
    refused = client.post(f"/migrations/{service.submit().id}/cutover")
    assert (refused.status_code, refused.json()["code"]) == (409, "E_MIG_CONFLICT")
    assert refused.json()["hint"]


def test_a_repair_answers_a_job_of_its_own(service: Service, client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    job = service.submit()
    refused = client.post(f"/migrations/{job.id}/repair")
    assert (refused.status_code, refused.json()["code"]) == (409, "E_MIG_CONFLICT")
    monkeypatch.setattr(service.intake, "_repair", lambda found, check_only: Repair(of=found.id, check_only=check_only))
    answer = client.post(f"/migrations/{job.id}/repair", params={"check_only": "true"})
    made = answer.json()
    assert (answer.status_code, answer.headers["Location"].endswith(f"/migrations/{made['id']}")) == (201, True)
    assert (made["state"], made["name"], made["repair"]["of"], made["repair"]["check_only"]) == (
        "Queued",
        job.name,
        str(job.id),
        True,
    )
    assert client.get(f"/migrations/{made['id']}").json()["repair"] == made["repair"]
    second = client.post(f"/migrations/{job.id}/repair")
    assert (second.status_code, made["id"] in second.json()["detail"]) == (409, True)
    assert client.post(f"/migrations/{made['id']}/cutover").status_code == 409
    assert client.post(f"/migrations/{job.id}/repair", params={"check_only": "perhaps"}).status_code == 400


@pytest.mark.parametrize("unknown", [str(UUID(int=1)), "nope", "%00", "%ff%fe", "x" * 3000])
@pytest.mark.parametrize(("method", "suffix"), [("GET", ""), ("POST", "/cancel"), ("POST", "/cutover"), ("POST", "/repair")])
def test_an_unknown_id(refusing: httpx.Client, unknown: str, method: str, suffix: str) -> None:
    response = refusing.request(method, f"/migrations/{unknown}{suffix}")
    assert (response.status_code, response.json()["code"]) == (404, "E_MIG_NOT_FOUND")
    assert len(response.content) < 1000


def test_listing_does_not_change_with_the_base_url(service: Service, client: httpx.Client) -> None:
    assert json.loads(client.get("http://synvirt/healthz").text)["status"] == "ok"
    assert client.get("http://synvirt/elsewhere/api/v1/migrator/migrations").status_code == 404
