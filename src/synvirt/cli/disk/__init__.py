"""synvirt disk: the data path alone, with no service.

`program.py` parses the arguments; each command is a module, imported when it runs.
"""
