"""A service on real sockets, and a client of it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.fakes.service import Service


@pytest.fixture
def has_pages() -> bool:
    """Whether the service has the page too. Who looks at it says so: `with_the_page`."""
    return False


with_the_page = pytest.mark.parametrize("has_pages", [True], ids=["with the page"])


@pytest.fixture
def service(tmp_path: Path, has_pages: bool) -> Iterator[Service]:
    made = Service(tmp_path, has_pages=has_pages)
    with made.served():
        yield made
    made.close()


@pytest.fixture(scope="module")
def refusing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """For requests that are refused and leave nothing behind: one service for all of a module's."""
    made = Service(tmp_path_factory.mktemp("service"))
    with made.served(), made.local() as client:
        yield client
        assert made.store.documents(limit=1) == ([], None)
    made.close()


@pytest.fixture
def client(service: Service) -> Iterator[httpx.Client]:
    with service.local() as client:
        yield client
