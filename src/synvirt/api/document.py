"""The OpenAPI document: adds our errors, bodies, callers and stream, which FastAPI cannot know."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema

from synvirt.api.callers.gate import OPEN_PATHS
from synvirt.api.callers.roles import needed_role
from synvirt.api.problems import MEDIA_TYPE
from synvirt.api.routes.tokens import TokenRequest
from synvirt.backups.model import (
    BackupJobChange,
    BackupJobRequest,
    BackupRepositoryChange,
    BackupRepositoryRequest,
    RestorePointChange,
    RestoreRequest,
    RunUpdate,
    SealedKeyRequest,
)
from synvirt.fleet.forecasting import WhatIf
from synvirt.fleet.model import ApprovalRequest, RollBackRequest, WaveRequest, WaveRetryRequest, WaveUpdate
from synvirt.fleet.querying import VmQuery
from synvirt.model.access import RemoteFileRequest
from synvirt.model.files import HostFileRequest, UploadInspectRequest
from synvirt.model.job import Migration, ProgressUpdate
from synvirt.model.plan import PlanEnvelope, RetryRequest
from synvirt.model.problems import ProblemDetails
from synvirt.model.rehearsal import RehearsalRequest, TogetherRequest
from synvirt.model.sources import SourceChange, SourceRequest

_REF = "#/components/schemas/{model}"
# Only hand-written parts of the document name these, so FastAPI does not find them.
_MODELS = (
    PlanEnvelope,
    RetryRequest,
    RehearsalRequest,
    TogetherRequest,
    HostFileRequest,
    UploadInspectRequest,
    RemoteFileRequest,
    SourceRequest,
    SourceChange,
    BackupRepositoryRequest,
    BackupRepositoryChange,
    BackupJobRequest,
    BackupJobChange,
    RestorePointChange,
    RestoreRequest,
    SealedKeyRequest,
    RunUpdate,
    TokenRequest,
    WaveRequest,
    ApprovalRequest,
    RollBackRequest,
    WaveRetryRequest,
    WhatIf,
    VmQuery,
    WaveUpdate,
    ProblemDetails,
    ProgressUpdate,
    Migration,
)

# Their accounts have no role, and may call nothing else.
_OF_PEERS = "/backup/peer/"
# Paths whose query may name a missing thing, as a plan or another body may.
_NAMING = ("/stream", "/host-files")

_PROBLEM = {"content": {MEDIA_TYPE: {"schema": {"$ref": _REF.format(model="ProblemDetails")}}}}
_CALLER = {
    "401": {
        "description": "E_MIG_UNAUTHENTICATED (/backup: E_BAK_UNAUTHENTICATED): the caller's credentials are missing or wrong",
        "headers": {"WWW-Authenticate": {"schema": {"type": "string"}}},
    },
    "429": {
        "description": "E_MIG_BAD_REQUEST (/backup: E_BAK_BAD_REQUEST): too many wrong passwords came, and none is checked now",
        "headers": {"Retry-After": {"schema": {"type": "integer"}}},
    },
}
_ROLE = {
    "403": {
        "description": "E_MIG_FORBIDDEN (/backup: E_BAK_FORBIDDEN): the caller's role does not permit this; "
        "`x-required-role` is the one needed"
    }
}
_HOST = {
    "500": {"description": "E_MIG_PERSIST_FAILED, E_MIG_INTERNAL: an error of the host; `detail` names its entry in the log"},
}
_BAD_REQUEST = {"400": {"description": "E_MIG_BAD_REQUEST: malformed; `detail` names the field"}}
_MEDIA_TYPE = {"415": {"description": "E_MIG_BAD_REQUEST: the body's Content-Type is not one of these"}}
_BAD_PLAN = {
    "400": {
        "description": "E_MIG_BAD_REQUEST, E_MIG_INVALID_PLAN, E_MIG_UNSUPPORTED_FORMAT, E_MIG_MALFORMED_ARCHIVE, "
        "E_MIG_HOST_PATH_REJECTED: what was sent, or the file that it names, cannot be used; `detail` says which and why"
    }
}
_NOT_FOUND = {"404": {"description": "E_MIG_NOT_FOUND: there is no such object"}}
_CONFLICT = {"409": {"description": "E_MIG_CONFLICT: the request does not fit the job's present state"}}
_CHANGED = {
    "412": {
        "description": "E_MIG_CONFLICT (/backup: E_BAK_CONFLICT): it was changed since the answer whose ETag is in `If-Match`; "
        "nothing was changed now"
    }
}
ETAG = {"ETag": {"description": "of what is stored, for `If-Match`", "schema": {"type": "string"}}}
_LOCATION = {"Location": {"description": "the path of the new object", "schema": {"type": "string"}}}
# Of a route's own `responses`: what was begun has a path of its own, at which its state is (RFC 9110 section 15.3.3).
BEGUN: dict[int | str, dict[str, Any]] = {202: {"headers": _LOCATION}}


def problem_described(description: str) -> dict[str, Any]:
    """The description of one of a route's own `responses`."""
    return {"description": description} | _PROBLEM


def described(app: FastAPI, *, api_prefix: str) -> dict[str, Any]:
    """The OpenAPI 3.1 document of the app, with our errors, bodies, roles and streams."""
    document = get_openapi(
        title=app.title, version=app.version, description=app.description, routes=app.routes, openapi_version="3.1.0"
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    _, added = models_json_schema([(model, "serialization") for model in _MODELS], ref_template=_REF)
    schemas.update({name: schema for name, schema in added["$defs"].items() if name not in schemas})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    document["components"]["securitySchemes"] = {
        "basic": {"type": "http", "scheme": "basic"},
        "token": {"type": "http", "scheme": "bearer", "description": "a secret of POST /tokens"},
    }
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            guarded = path not in OPEN_PATHS
            _complete(operation, method, path, guarded=guarded)
            if _takes_tag(operation):
                operations["get"]["responses"]["200"]["headers"] = ETAG
            if guarded and not path.startswith(f"{api_prefix}{_OF_PEERS}"):
                beneath = path.removeprefix(api_prefix.removesuffix("/api/v1"))
                operation["security"].append({"token": []})  # or: any of them is enough
                operation["x-required-role"] = str(needed_role(method.upper(), beneath))
                operation["responses"].setdefault("403", _ROLE["403"] | _PROBLEM)
    return document


def _complete(operation: dict[str, Any], method: str, path: str, *, guarded: bool) -> None:
    responses = operation["responses"]
    if "application/json" in responses.get("422", {}).get("content", {}):  # FastAPI's own: ours are 400, and problems
        del responses["422"]
    mistakes: dict[str, Any] = {}
    inspects = path.endswith("/inspect")
    takes_json = "application/json" in operation.get("requestBody", {}).get("content", {})
    if "requestBody" in operation or inspects:
        mistakes |= _BAD_PLAN
        if "requestBody" in operation and "/peer/" not in path:
            mistakes |= _MEDIA_TYPE
    elif any(parameter["in"] == "query" for parameter in operation.get("parameters", [])):
        mistakes |= _BAD_REQUEST
    if "{" in path or takes_json or path.endswith(_NAMING):
        mistakes |= _NOT_FOUND
    if method in ("post", "delete") and "{" in path and not inspects:
        mistakes |= _CONFLICT
    if _takes_tag(operation):
        mistakes |= _CHANGED
    mistakes |= _HOST
    if guarded:
        operation["security"] = [{"basic": []}]
        mistakes |= _CALLER
    for status, description in mistakes.items():
        responses.setdefault(status, description | _PROBLEM)
    if method == "post" and "201" in responses:
        responses["201"]["headers"] = _LOCATION


def _takes_tag(operation: dict[str, Any]) -> bool:
    return any(parameter["name"] == "If-Match" for parameter in operation.get("parameters", []))
