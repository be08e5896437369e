"""Tests that run inside the lab guest, on real zfs: tests/real/test_zfs.py boots it and runs them there."""
