"""What tests/conftest.py does for tests outside the guest, as far as the guest needs it. Its imports alone take a minute."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.store_template import stores_from

# Made by the host: Alembic takes half a minute here.
TEMPLATE = Path("/result/store.db")


@pytest.fixture(scope="session", autouse=True)
def _store_template() -> Iterator[None]:
    with stores_from(TEMPLATE):
        yield
