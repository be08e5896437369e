"""Btrfs, read without mounting it: trees.py finds items by their keys, subvolumes.py has files and folders.

Format: «Btrfs on-disk format», https://btrfs.readthedocs.io/en/latest/dev/On-disk-format.html; LZO's framing: Linux,
fs/btrfs/lzo.c. What it raises is ours: DiskReadFailed for damage, UnsupportedFormat for what is not read here.
"""
