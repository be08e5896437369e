"""Facts of a guest from QEMU's agent in it, through Proxmox VE's API (`…/agent/get-host-name` and so on): the agent's own
documents, with the common names of all platforms' facts (ReportsGuestFacts). The API runs no programs in a guest for us.
"""

from collections.abc import Callable
from typing import Any

from synvirt.kvm.agent_facts import facts_of

# The API's name of a command is the agent's without this prefix.
_HEAD = "guest-"


def guest_facts(ask: Callable[[str], Any]) -> dict[str, str]:
    """`ask`: sends a command of the API, such as `get-osinfo`; None, where there is no answer."""
    return facts_of(lambda command: ask(command.removeprefix(_HEAD)))
