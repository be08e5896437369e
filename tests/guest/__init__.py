"""Tests that run inside the lab guest, on real zfs: tests/real/test_zfs.py boots it and runs them there.

Their files are not called test_….py, so that they are not run here, where there is no zfs.
"""
