"""This host's guests as a run reads them, each held at one moment.

Read `guest.py` (the table of ways), then a way: `offline.py`, `bitmap.py`, `zfs.py`.
"""
