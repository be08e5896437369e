"""synvirt disk: only the data path, without a service.

`program.py` parses the arguments; each command is a module, imported when it runs.
"""
