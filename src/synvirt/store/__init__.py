"""The persistent store: jobs, their events, watermarks and ledgers, uploads. SQL, on SQLite or PostgreSQL; blocking code."""

from synvirt.store.store import Event, LedgerEntry, Store, Watermark

__all__ = ["Event", "LedgerEntry", "Store", "Watermark"]
