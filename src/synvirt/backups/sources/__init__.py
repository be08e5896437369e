"""How a run reads this host's guests, each held at one moment.

Read `guest.py` (the table of ways), then a way: `offline.py`, `bitmap.py`, `zfs.py`.
"""
