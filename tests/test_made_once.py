"""What tests share leaves nothing of one test to the next."""

import gc
import weakref
from pathlib import Path

from tests.fakes.service import Service


def test_a_service_that_is_closed_stays_in_no_memory(tmp_path: Path) -> None:
    """Its routes with all that they reach: 27,000 objects, which a worker would have for each of a thousand tests."""
    service = Service(tmp_path)
    with service.served(), service.local() as client:
        assert client.get("/migrations").status_code == 200
    service.close()
    left = weakref.ref(service.app)
    del service
    gc.collect()
    assert left() is None
