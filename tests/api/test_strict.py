"""Query parameters that a route does not take, HEAD, the filters of the list, and whose codes an error has."""

import asyncio
from uuid import UUID, uuid4

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from synvirt.api.strict import Heads
from synvirt.model.job import Migration
from synvirt.model.kinds import Mode, State
from synvirt.model.plan import MigrationPlan
from synvirt.model.values import now
from tests.fakes.service import PLAN, Service
from tests.house import live_plan


@pytest.mark.parametrize(
    ("path", "code", "hint"),
    [
        ("/migrations?sate=Failed", "E_MIG_BAD_REQUEST", "did you mean state?"),
        ("/migrations/stream?nosuch=1", "E_MIG_BAD_REQUEST", "it takes migration_id"),
        (f"/migrations/{UUID(int=1)}?x=1", "E_MIG_BAD_REQUEST", "it takes none"),
        ("/host-files?paht=x", "E_MIG_BAD_REQUEST", "did you mean path?"),
        ("/backup/runs?limt=1", "E_BAK_BAD_REQUEST", "did you mean limit?"),
    ],
)
def test_an_unknown_parameter_is_refused(refusing: httpx.Client, path: str, code: str, hint: str) -> None:
    answer = refusing.get(path if not path.startswith("/backup") else f"../backup{path.removeprefix('/backup')}")
    problem = answer.json()
    assert (answer.status_code, problem["code"]) == (400, code)
    assert problem["hint"].startswith(hint)


@pytest.mark.parametrize("name", [b"%FF", b"caf%C3", b"%ED%A0%80"], ids=["a byte", "half a character", "a surrogate"])
def test_a_query_that_is_no_text_is_refused(refusing: httpx.Client, name: bytes) -> None:
    """Else it filters by other characters. httpx would encode the bytes again."""
    asked = refusing.build_request("GET", "/migrations", extensions={"target": b"/api/v1/migrator/migrations?name=" + name})
    refused = refusing.send(asked)
    assert (refused.status_code, refused.json()["code"]) == (400, "E_MIG_BAD_REQUEST")
    assert refused.json()["hint"].startswith("é is sent as %C3%A9")


def test_every_parameter_that_the_document_has_is_known(service: Service, client: httpx.Client) -> None:
    """Those that a route takes as one model too. Other mistakes in the request are reported for other fields."""
    for path, methods in service.app.openapi()["paths"].items():
        parameters = [each["name"] for each in methods.get("get", {}).get("parameters", []) if each["in"] == "query"]
        if parameters and "/peer/" not in path and not path.endswith("/stream"):
            some = "/".join(str(UUID(int=1)) if part.startswith("{") else part for part in path.split("/"))
            answer = client.get(f"http://synvirt{some}", params=dict.fromkeys(parameters, "1"))
            assert "is not a parameter" not in answer.text, path


def test_a_parameter_with_one_value_is_given_once(service: Service, client: httpx.Client) -> None:
    """Each of each operation: else the last one counts, and the caller may have meant the first. Those of a list are not."""
    for path, operations in service.app.openapi()["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", []):
                if parameter["in"] != "query" or "/peer/" in path:
                    continue
                lists = any(schema.get("type") == "array" for schema in parameter["schema"].get("anyOf", [parameter["schema"]]))
                some = "/".join(str(UUID(int=1)) if part.startswith("{") else part for part in path.split("/"))
                twice = client.request(method, f"http://synvirt{some}?{parameter['name']}=x&{parameter['name']}=x")
                assert ("is given more than once" in twice.text) != lists, (method, path, parameter["name"])
    twice = client.post(
        "/migrations?dry_run=true&dry_run=false", json={"plan": PLAN.model_dump(mode="json", exclude_defaults=True)}
    )
    assert (twice.status_code, client.get("/migrations").json()["items"]) == (400, [])


def test_no_page_of_the_browser_is_held_to_that(refusing: httpx.Client) -> None:
    """Others add parameters of their own to links."""
    assert refusing.get("http://synvirt/?utm_source=mail").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/openapi.json", "/metrics", "/api/v1/migrator/migrations", "/"])
def test_head_answers_as_get_without_a_body(refusing: httpx.Client, path: str) -> None:
    got, head = refusing.get(f"http://synvirt{path}"), refusing.head(f"http://synvirt{path}")
    assert (head.status_code, head.content) == (got.status_code, b"")
    assert head.headers["content-type"] == got.headers["content-type"]


def test_head_of_a_stream_ends(refusing: httpx.Client) -> None:
    head = refusing.head("/migrations/stream")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"].startswith("text/event-stream")


def test_who_asks_for_the_head_of_a_stream_has_left_once_it_is_answered() -> None:
    """Else each load balancer that asks so would keep a stream of events open behind it."""
    asked, sent = 0, list[Message]()

    async def stream(_scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"event", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"

    async def client() -> Message:
        nonlocal asked
        asked += 1
        return {"type": "http.request", "body": b"", "more_body": False}

    async def answer_part(message: Message) -> None:
        sent.append(message)

    asyncio.run(Heads(stream)({"type": "http", "method": "HEAD"}, client, answer_part))
    assert asked == 0
    assert [(one["type"], one.get("body"), one.get("more_body")) for one in sent] == [
        ("http.response.start", None, None),
        ("http.response.body", b"", False),
    ]


def test_head_of_what_is_not_there_and_of_what_get_cannot_do(refusing: httpx.Client) -> None:
    assert refusing.head(f"/migrations/{uuid4()}").status_code == 404
    assert refusing.head(f"/migrations/{uuid4()}/cancel").status_code == 405


def _job(service: Service, name: str, state: State = State.QUEUED, plan: MigrationPlan = PLAN) -> UUID:
    job = Migration(id=uuid4(), name=name, plan=plan, state=state, mode_effective=Mode.COLD, created_at=now())
    service.store.add(job, host="local")
    return job.id


def test_the_list_is_narrowed_by_state_name_and_source(service: Service, client: httpx.Client) -> None:
    web, odd = _job(service, "web"), _job(service, 'a "%_!" b', State.FAILED)
    live = _job(service, "web", State.COMPLETED, live_plan())
    source_id = live_plan().model_dump(mode="json")["source_ref"]["source_id"]

    def found(**parameters: object) -> list[str]:
        answer = client.get("/migrations", params=parameters)  # type: ignore[arg-type]
        assert answer.status_code == 200
        return [item["id"] for item in answer.json()["items"]]

    assert found(state="Failed") == [str(odd)]
    assert found(state=["Failed", "Completed"]) == [str(live), str(odd)]
    assert found(name="web") == [str(live), str(web)]
    assert found(name="we") == found(name="%") == found(name="w_b") == []
    assert found(name="WEB") == [], "as PostgreSQL compares"
    assert found(name='a "%_!" b') == [str(odd)]
    assert found(source_id=source_id) == [str(live)]
    assert found(source_id=source_id, state="Failed") == found(source_id=str(uuid4())) == []
    assert found(name="web", limit=1) == [str(live)]
    assert found(host="local", state="Failed") == [str(odd)]
    assert found(host="another") == found(host="LOCAL") == []
    assert client.get("/migrations", params={"state": "Fialed"}).status_code == 400
