"""The only room that names concrete classes and puts them together: the service, and the command line with it.

running.py        the service: begun, run, ended, in an order that matters
migrations.py     what its jobs are made of
destinations.py   where volumes go
backups.py        what backups are made of
fleet.py          what waves are made of
ways_in.py        the API's routes and the page's
commands.py       synvirt serve and synvirt demo

Heavy modules are imported where they are used, so that `synvirt --help` has nothing to wait for.
"""

from synvirt.cli import app
from synvirt.main.commands import main
from synvirt.main.running import Service, service

__all__ = ["Service", "app", "main", "service"]
