"""VMware's own files. `configuration.py` reads a .vmx, `folder.py` finds the disks beside it."""
