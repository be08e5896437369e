"""synvirt backup. `commands.py` puts it together; the others are its parts."""
