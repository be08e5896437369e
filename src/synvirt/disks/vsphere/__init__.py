"""Byte sources of vSphere: datastore.py (ranges of /folder), exported.py (export leases), vddk.py (nbdkit's vddk plugin)."""
