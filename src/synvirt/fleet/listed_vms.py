"""The size of each VM of a wave and its host at the source, by the source's list, until the member has a job.

The scheduler of waves needs this in each tick, and a source may take minutes to answer: so the list is fetched in the
background.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID

import structlog

from synvirt.errors import SynvirtError
from synvirt.live import VmRow

log = structlog.get_logger(__name__)

# The VMs of a source by their ids.
Rows = Callable[[UUID], Coroutine[Any, Any, Mapping[str, VmRow]]]

# VMs rarely move, and a job's facts replace these.
KEPT_S = 600.0
# The pause before a source that did not answer is asked again.
AGAIN_S = 30.0
# So that a source that hangs does not delay the others.
ASKED_AT_ONCE = 4


class ListedVms:
    """The VMs that sources list, kept for a while and asked for in the background."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._lock = threading.Lock()
        self._rows_of: dict[UUID, Mapping[str, VmRow]] = {}
        self._ask_at: dict[UUID, float] = {}
        self._failed: dict[UUID, str] = {}
        self._pool = ThreadPoolExecutor(ASKED_AT_ONCE, thread_name_prefix="listed-vms")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def of(self, source_id: UUID, vm_id: str) -> VmRow | None:
        """The VM's row. None: its source has not answered yet. For a VM that it does not list, an empty row. Returns at
        once."""
        with self._lock:
            if time.monotonic() >= self._ask_at.get(source_id, 0.0):
                self._ask_at[source_id] = float("inf")
                try:
                    self._pool.submit(self._ask, source_id)
                except RuntimeError as error:  # it was closed meanwhile, or there is no memory for a thread
                    log.warning("a source cannot be asked for its VMs now", source=str(source_id), cause=str(error))
                    self._ask_at[source_id] = time.monotonic() + AGAIN_S
            known = self._rows_of.get(source_id)
        return None if known is None else known.get(vm_id) or VmRow(vm_id, vm_id, "")

    def failure_of(self, source_id: UUID) -> str | None:
        """Why the source did not answer when it was last asked; None: it answered, or was not asked yet."""
        with self._lock:
            return self._failed.get(source_id)

    def _ask(self, source_id: UUID) -> None:
        pause_s = AGAIN_S
        try:
            found = asyncio.run(self._rows(source_id))
            with self._lock:
                self._rows_of[source_id] = found
                self._failed.pop(source_id, None)
            pause_s = KEPT_S
        except SynvirtError as error:
            self._note(source_id, error.detail)
            log.warning("a source does not list its VMs", source=str(source_id), cause=error.detail)
        except Exception:
            self._note(source_id, "its answer cannot be used")
            log.exception("a source's list of VMs cannot be used", source=str(source_id))
        finally:
            with self._lock:
                self._ask_at[source_id] = time.monotonic() + pause_s

    def _note(self, source_id: UUID, failure: str) -> None:
        with self._lock:
            self._failed[source_id] = failure
