"""XenServer and XCP-ng, as their published data model says they answer.

xenapi.json  that model, compact; its head says from where     model.py   calls, types, roles and errors by it
pool.py      VMs, disks, snapshots, tracking, sessions, tasks   vhd.py     VHDs as vhd-tool streams them
server.py    the hosts on the network, with a real NBD server
"""

from tests.fakes.xenserver.pool import PASSWORD, TRACKED_BYTES, USER
from tests.fakes.xenserver.server import ADDRESSES, XenServer, xenserver

__all__ = ["ADDRESSES", "PASSWORD", "TRACKED_BYTES", "USER", "XenServer", "xenserver"]
