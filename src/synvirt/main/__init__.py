"""The only room that names concrete classes and puts them together: the service, and the command line with it.

running.py        the service: its start and its end, in an order that matters
migrations.py     the parts of migrations
destinations.py   where volumes go
backups.py        the parts of backups
fleet.py          the parts of waves
ways_in.py        the API's routes and the page's
commands.py       synvirt serve and synvirt demo
arenas.py         how little memory the service's threads keep

Heavy modules are imported where they are used, so that `synvirt --help` is fast.
"""

from synvirt.cli import app
from synvirt.main.commands import main
from synvirt.main.running import Service, service

__all__ = ["Service", "app", "main", "service"]
