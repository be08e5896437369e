"""What all of Prism Central's v4 answers have: typed objects, pages, tasks and ETags."""

import re
from typing import Any

from tests.fakes.prism.state import Refusal, State

Answer = tuple[int, Any, dict[str, str]]


def typed(type_: str, /, **fields: Any) -> dict[str, Any]:
    """As every object of v4 comes: with its type, and with `$reserved`, into which the SDK puts the answer's ETag."""
    return {
        "$objectType": type_,
        "$reserved": {"$fv": "v4.r1"},
        **{name: value for name, value in fields.items() if value is not None},
    }


def vm_object(kind: str, /, **fields: Any) -> dict[str, Any]:
    return typed(f"vmm.v4.ahv.config.{kind}", **fields)


def ipv4(address: str) -> dict[str, Any]:
    return typed("common.v1.config.IPv4Address", value=address, prefixLength=32)


class Answering:
    """The parts of answers, over a State."""

    def __init__(self, state: State) -> None:
        self.state = state

    def _page(self, type_: str, entities: list[dict[str, Any]], query: dict[str, str]) -> Answer:
        page, limit = int(query.get("$page", "0")), int(query.get("$limit", "50"))
        if (wanted := re.fullmatch(r"name eq '([^']*)'", query.get("$filter", ""))) is not None:
            entities = [one for one in entities if one["name"] == wanted[1]]
        elif (wanted := re.fullmatch(r"startswith\(name, '([^']*)'\)", query.get("$filter", ""))) is not None:
            entities = [one for one in entities if one["name"].startswith(wanted[1])]
        elif query.get("$filter"):
            raise Refusal(400, f"cannot filter by {query['$filter']}")
        body = {
            "$objectType": type_,
            "metadata": {"totalAvailableResults": len(entities)},
            "data": entities[page * limit : (page + 1) * limit] or None,
        }
        return 200, {name: value for name, value in body.items() if value is not None}, {}

    def _one(self, type_: str, entity: dict[str, Any], etag: str = "") -> Answer:
        return 200, {"$objectType": type_, "data": entity, "metadata": {}}, {"ETag": etag} if etag else {}

    def _task(self, task_id: str, type_: str | None = None) -> Answer:
        body = {"data": typed("prism.v4.config.TaskReference", extId=task_id), "metadata": {}}
        return 202, body if type_ is None else {"$objectType": type_, **body}, {}

    def _did(self, operation: str, headers: dict[str, str], failure: str | None = None) -> Answer:
        task_id = self.state.task(operation, failure)
        self.state.requests[headers.get("ntnx-request-id", "")] = task_id
        return self._task(task_id)

    def _matched(self, headers: dict[str, str], etag: str) -> None:
        if "if-match" not in headers:
            raise Refusal(428, "If-Match is needed")
        if headers["if-match"] != etag:
            raise Refusal(412, "the ETag is outdated")

    def task(self, id_: str, **_: Any) -> Answer:
        if id_ not in self.state.tasks:
            raise Refusal(404, f"no task {id_}")
        task = self.state.tasks[id_]
        task["looks"] += 1
        ended = task["looks"] > 1
        entity = typed(
            "prism.v4.config.Task",
            extId=id_,
            operation=task["operation"],
            status=("FAILED" if task["failure"] else "SUCCEEDED") if ended else "RUNNING",
            createdTime=task["created"],
            progressPercentage=100 if ended else 50,
            errorMessages=[typed("prism.v4.error.AppMessage", message=task["failure"])] if task["failure"] and ended else None,
        )
        return self._one("prism.v4.config.GetTaskApiResponse", entity)

    def list_tasks(self, *, query: dict[str, str], **_: Any) -> Answer:
        return self._page("prism.v4.config.ListTasksApiResponse", [], query)
