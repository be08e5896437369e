"""synvirt disk: only the data path, without a service.

`program.py` runs a command: `plain.py` reads most command lines, `parsing.py` all others. Each command is a module,
imported when it runs.
"""
