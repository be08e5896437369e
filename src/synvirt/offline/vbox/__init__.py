"""VirtualBox machines. `machine.py` reads the Machine element, `folder.py` finds the disks beside it."""
