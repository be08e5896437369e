"""What a restore point becomes: files, a new guest, the guest as it was, a mount, a boot test.

Read `restoring.py` first: it is the table.
"""
