"""Parameters at the ends of what they may hold: numbers beyond the store's, texts with null bytes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest

from tests.fakes.service import Service

SOME_ID = str(UUID(int=1))
# Beyond all integers of SQL, just beyond its largest one, and what PostgreSQL takes in no text.
EXTREMES = ("9" * 30, str(2**63), "a%00b")


@pytest.fixture
def on_postgresql(tmp_path: Path, postgresql_url: str) -> Iterator[Service]:
    """It refuses more than SQLite."""
    made = Service(tmp_path, has_pages=False, database_url=postgresql_url, host_id="one")
    with made.served():
        yield made
    made.close()


def _parameters(service: Service) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, operations in service.app.openapi()["paths"].items():
        for method, operation in operations.items():
            for parameter in operation.get("parameters", []):
                if parameter["in"] != "header":
                    yield method, path, parameter


def test_every_number_in_a_request_has_a_limit_that_the_store_can_hold(service: Service) -> None:
    for method, path, parameter in _parameters(service):
        for schema in parameter["schema"].get("anyOf", [parameter["schema"]]):
            if schema.get("type") == "integer":
                assert schema.get("maximum", 2**63) < 2**63, (method, path, parameter["name"])


def test_no_value_of_a_parameter_is_an_error_of_the_service(on_postgresql: Service) -> None:
    """Each parameter of each operation in turn, in the path and in the query."""
    with on_postgresql.local() as client:
        for method, path, parameter in _parameters(on_postgresql):
            for value in EXTREMES:
                named, query = f"{{{parameter['name']}}}", f"?{parameter['name']}={value}"
                filled = "/".join(
                    value if part == named else SOME_ID if part.startswith("{") else part for part in path.split("/")
                )
                address = httpx.URL(f"http://synvirt{filled}{query if parameter['in'] == 'query' else ''}")
                answer = client.request(method, address)
                assert answer.status_code < 500, (method, address, answer.text)
