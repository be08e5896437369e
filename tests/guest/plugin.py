"""What tests/conftest.py does for tests outside the guest, as far as the guest needs it."""

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guest import forked_workers
from tests.running.store_template import stores_from

# Made by the host, where Alembic is faster.
TEMPLATE = Path("/result/store.db")


def pytest_collection_finish() -> None:
    """What is loaded by now stays, and is never looked through again."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _store_template() -> Iterator[None]:
    with stores_from(TEMPLATE), forked_workers.forked():
        yield
