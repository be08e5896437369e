"""The persistent store: jobs, events, watermarks, ledgers, uploads, sources. SQL, on SQLite or PostgreSQL; blocking code."""

from synvirt.store.events import Event
from synvirt.store.ledger import LedgerEntry
from synvirt.store.store import Store, Wish
from synvirt.store.watermarks import Watermark

__all__ = ["Event", "LedgerEntry", "Store", "Watermark", "Wish"]
