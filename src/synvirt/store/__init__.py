"""The persistent store: jobs, events, watermarks, ledgers, uploads, sources. SQL, on SQLite or PostgreSQL; blocking code.

store.py has the transactions and the queries about migrations; each other file has the queries about one noun, as a part of the
store. tables.py has all tables, documents.py how stored documents are read and written.
"""

from synvirt.store.events import Event
from synvirt.store.ledger import LedgerEntry
from synvirt.store.store import Store, Wish
from synvirt.store.watermarks import Watermark

__all__ = ["Event", "LedgerEntry", "Store", "Watermark", "Wish"]
