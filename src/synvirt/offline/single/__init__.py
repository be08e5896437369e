"""One disk image and nothing else. `disk.py` has what the kinds share."""
