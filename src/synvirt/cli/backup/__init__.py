"""synvirt backup. `commands.py` assembles it from the other files."""
