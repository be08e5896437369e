"""synvirt import, inspect, migrations: a plan sent, and its job watched. Read `importing.py`, then `watching.py`."""
