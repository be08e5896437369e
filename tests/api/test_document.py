"""The OpenAPI document: complete, and true of the service."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from hypothesis.configuration import storage_directory

from tests.fakes.service import PASSWORD, PREFIX, USER, Service
from tests.running import forked


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = [sys.executable, "-m", "tests.fakes.serving", str(tmp_path_factory.mktemp("service"))]
    with forked.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.stdin.close()
        assert process.wait() == 0


@pytest.fixture(scope="module")
def document(running: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{running}/openapi.json", timeout=60).json()
    return answer


# A schema cannot say which path lies in the import root, which cursor was given out, which digest a file has, which URL names a
# host, or what each kind of source takes: 400, 413 and 422 are right answers, and so is
# 502 for a repository in a folder that is not there. And `--auth` puts back the header that a case took away; any text of
# If-Match is a list of tags, and of none that is there: 412.
REFUSED_BY_CONTENT = """
[checks]
negative_data_rejection.expected-statuses = [400, 401, 403, 404, 405, 406, 409, 412, 415, 422, 428, 429, "5xx"]

[[operations]]
include-path-regex = "/(uploads|host-files|remote-files|sources|waves|windows)|/(migrations|destinations|hosts)$|/backup/"
checks.positive_data_acceptance.enabled = false

[[operations]]
include-path-regex = "/backup/repositories(/[^/]+)?$"
checks.not_a_server_error.enabled = false

# Their bodies hold plans, and take ten times as long to make.
[[operations]]
include-path-regex = "/waves"
generation.max-examples = 4

[[operations]]
include-path-regex = "/sources$"
include-method = "GET"
checks.negative_data_rejection.enabled = false
"""

# Else a sixth of its processor time is the garbage collector's, which walks through all of its modules again and again.
SCHEMATHESIS = """
import gc
from schemathesis.cli import schemathesis
gc.freeze()
gc.set_threshold(20_000, 20, 4)
schemathesis()
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("document")  # made by now: Schemathesis waits ten seconds for it, and no longer
def test_the_service_does_what_the_document_says(running: str, tmp_path: Path) -> None:
    """Schemathesis: valid and invalid requests to each operation, alone and in sequence; every answer against the document."""
    (tmp_path / "schemathesis.toml").write_text(REFUSED_BY_CONTENT)
    command = [
        sys.executable,
        "-c",
        SCHEMATHESIS,
        "run",
        f"{running}/openapi.json",
        "--auth",
        f"{USER}:{PASSWORD}",
    ]
    # The stream has no end to wait for: test_stream.py has it.
    command += ["--exclude-path-regex", "stream$", "--max-examples", "10", "--seed", "1", "--max-failures", "5"]
    command += ["--request-timeout", "60", "--generation-database", "none"]
    # There the tests' own process has put Hypothesis' tables of characters, which take two seconds to make.
    known = {"HYPOTHESIS_STORAGE_DIRECTORY": str(storage_directory().path)}
    done = subprocess.run(
        [*command, "--no-color"], cwd=tmp_path, env=os.environ | known, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 generated" not in done.stdout


def test_every_operation_with_a_login_declares_it_and_its_problems(document: dict[str, Any]) -> None:
    for path, operations in document["paths"].items():
        for operation in operations.values():
            guarded = path != "/healthz"
            ways = ["basic"] if "/peer/" in path else ["basic", "token"]
            assert operation.get("security") == ([{way: []} for way in ways] if guarded else None)
            uploading = operation["operationId"] == "upload"
            assert ("422" in operation["responses"]) == uploading, "400 for what is malformed, 422 for a wrong digest"
            problems = {status: answer for status, answer in operation["responses"].items() if status >= "400"}
            assert "500" in problems
            assert ("401" in problems) == guarded
            by_peers = "/backup/peer/" in path
            assert ("x-required-role" in operation) == ("403" in problems) == (guarded and not by_peers)
            names_a_thing = "{" in path or path.endswith(("/stream", "/host-files")) or "PlanEnvelope" in str(operation)
            assert ("404" in problems) or not names_a_thing
            for answer in problems.values():
                assert list(answer["content"]) == ["application/problem+json"]
                assert answer["description"].startswith(("E_MIG_", "E_BAK_"))


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    def references(node: Any) -> Iterator[str]:
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                yield node["$ref"]
            for value in node.values():
                yield from references(value)
        elif isinstance(node, list):
            for value in node:
                yield from references(value)

    schemas = {f"#/components/schemas/{name}" for name in document["components"]["schemas"]}
    assert set(references(document)) <= schemas
    assert {"#/components/schemas/" + name for name in ("Migration", "PlanEnvelope", "ProgressUpdate")} <= schemas


def test_the_stream_is_described(document: dict[str, Any]) -> None:
    operation = document["paths"][f"{PREFIX}/migrations/stream"]["get"]
    assert list(operation["responses"]["200"]["content"]) == ["text/event-stream"]
    assert [parameter["name"] for parameter in operation["parameters"]] == ["migration_id", "Last-Event-ID"]


def test_operations_have_names_for_generated_clients(document: dict[str, Any]) -> None:
    names = [operation["operationId"] for operations in document["paths"].values() for operation in operations.values()]
    assert len(set(names)) == len(names)
    assert {"submit", "list_migrations", "load", "cancel", "cutover", "stream", "health"} <= set(names)


@pytest.mark.parametrize("base_url", ["/synvirt", "synvirt/", "/a/b"])
def test_a_base_url_is_before_every_path_of_the_api(tmp_path: Path, base_url: str) -> None:
    service = Service(tmp_path, base_url=base_url)
    before = f"/{base_url.strip('/')}/api/v1/"
    prefix = f"{before}migrator"
    with service.served(), service.local() as client:
        assert client.get(f"http://x{prefix}/migrations").status_code == 200
        assert client.get("/migrations").status_code == 404
        paths = client.get("http://x/openapi.json").json()["paths"]
        assert {path for path in paths if not path.startswith(before)} == {"/healthz", "/metrics"}
        assert client.get(f"http://x{prefix}/migrations/{uuid4()}").status_code == 404
    service.close()


def test_every_list_has_pages(document: dict[str, Any]) -> None:
    """Else a client of all lists has to know which of them are whole. What a retention would do is one plan, not a list."""
    for path, operations in document["paths"].items():
        answer = operations.get("get", {}).get("responses", {}).get("200", {}).get("content", {}).get("application/json", {})
        of = document["components"]["schemas"].get(answer.get("schema", {}).get("$ref", "").rpartition("/")[2], {})
        if "items" in of.get("properties", {}) and not path.endswith("/retention"):
            assert "next_cursor" in of["properties"], path
            assert {"limit", "cursor"} <= {each["name"] for each in operations["get"]["parameters"]}, path


# Names of earlier versions that clients use, each with the same in the units of all others; and those that the contract has.
OLD_UNITS = {
    ("BootTest", "seconds"): "boot_s",
    ("GuestTaken", "freeze_ms"): "freeze_s",
    ("RestorePoint", "freeze_ms"): "freeze_s",
    ("SourceCheck", "bytes_per_s"): "rate_bps",
    ("Pass", "seconds"): "seconds",
    ("SourceTest", "latency_ms"): "latency_ms",
}


def test_a_duration_ends_in_s_and_a_rate_in_bps(document: dict[str, Any]) -> None:
    found = set()
    for name, schema in document["components"]["schemas"].items():
        for field in schema.get("properties", {}):
            if field.endswith(("_ms", "seconds", "_per_s", "_min", "_h")):
                found.add((name, field))
                assert OLD_UNITS.get((name, field)) in schema["properties"], (name, field)
    assert found == OLD_UNITS.keys()
