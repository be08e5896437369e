"""Btrfs, read without mounting it: trees.py finds items by their keys, subvolumes.py has files and folders.

Format: «Btrfs on-disk format», https://btrfs.readthedocs.io/en/latest/dev/On-disk-format.html; LZO's framing: Linux,
fs/btrfs/lzo.c. It raises DiskReadFailed for damage, and UnsupportedFormat for what it cannot read.
"""
