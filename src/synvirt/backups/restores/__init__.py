"""Restores of a point: to files, a new guest, the same guest, a mount, a boot test.

Read `restoring.py` first: it is the table.
"""
