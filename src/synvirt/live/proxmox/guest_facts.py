"""What runs in a guest, by QEMU's agent in it, asked by Proxmox VE's API (`…/agent/get-host-name` and so on): the agent's own
documents, in the names that every platform's facts have (TellsOfGuest). The API runs no programs in a guest for us.
"""

from collections.abc import Callable
from typing import Any

from synvirt.kvm.agent_facts import facts_of

# The API's name of a command is the agent's without its head.
_HEAD = "guest-"


def guest_facts(ask: Callable[[str], Any]) -> dict[str, str]:
    """`ask`: a question of the API's, `get-osinfo`; None, where it is not answered."""
    return facts_of(lambda command: ask(command.removeprefix(_HEAD)))
