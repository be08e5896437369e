"""One service for the tests of uploads that leave nothing behind."""

from collections.abc import Iterator

import httpx
import pytest

from tests.api.uploads.sending import assert_nothing
from tests.fakes.service import Service


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """For tests that leave nothing behind: one service for all of them."""
    made = Service(tmp_path_factory.mktemp("service"))
    with made.served():
        yield made
    made.close()


@pytest.fixture
def sender(shared: Service) -> Iterator[httpx.Client]:
    with shared.local() as client:
        yield client
    for upload in shared.uploads.page(limit=100)[0]:
        shared.uploads.remove(upload.id)
    assert_nothing(shared)
