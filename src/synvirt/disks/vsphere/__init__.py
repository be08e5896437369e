"""Byte sources of vSphere: datastore.py (ranges of /folder), exported.py (export leases), vddk.py (nbdkit's vddk plugin).

lease_end.py is a process that ends the export leases of a service that was killed.
"""
