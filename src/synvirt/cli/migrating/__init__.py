"""synvirt import, inspect, migrations: sends a plan, and watches its job. Read `importing.py`, then `watching.py`."""
