"""Deliveries to webhooks, for people. Blocking code, called by the API and the page."""

import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from uuid import UUID

from synvirt.fleet.model import Delivery
from synvirt.store.wave_hooks import PENDING, DeliveryRow, HookRows


class Deliveries:
    """`changed()`: called after each request, so that it is handled at once."""

    def __init__(self, rows: HookRows, *, changed: Callable[[], None] = lambda: None) -> None:
        self._rows, self._changed = rows, changed

    def page(
        self, wave_id: UUID, *, limit: int, cursor: int | None = None, states: Sequence[str] = ()
    ) -> tuple[list[Delivery], int | None]:
        """Newest first."""
        rows, following = self._rows.page(wave_id, limit=limit, cursor=cursor, states=states)
        return [shown(row) for row in rows], following

    def again(self, wave_id: UUID, number: int) -> Delivery:
        """Tries a delivery again. NotFound; Conflict, if it was not given up."""
        row = self._rows.again(wave_id, number)
        self._changed()
        return shown(row)


def shown(row: DeliveryRow) -> Delivery:
    """A delivery as the API answers it."""
    member = json.loads(row.body).get("member")
    return Delivery.model_validate(
        {
            "number": row.number,
            "hook_id": row.hook_id,
            "event": row.event,
            "member": None if member is None else member["id"],
            "state": row.state,
            "attempts": row.attempts,
            "made_at": datetime.fromtimestamp(row.made_at, UTC),
            "next_at": datetime.fromtimestamp(row.next_at, UTC) if row.state == PENDING else None,
            "answer": row.answer,
        }
    )
