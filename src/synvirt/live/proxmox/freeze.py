"""The process that freezes a guest of Proxmox VE (holding.py): `python -m synvirt.live.proxmox.freeze`.

By the guest's agent, through the API: POST agent/fsfreeze-freeze and -thaw. The VM's node is requested each time.
"""

from contextlib import AbstractContextManager
from typing import Any

from synvirt.errors import Internal, SynvirtError, VmNotFound
from synvirt.live import SourceAccess, holding
from synvirt.live.holding import THAW_MOST_S, Hold
from synvirt.live.proxmox.api import Api
from synvirt.live.proxmox.cluster import Cluster
from synvirt.live.proxmox.form import FORM


def frozen(access: SourceAccess, vm_id: str) -> AbstractContextManager[Hold]:
    return holding.frozen("synvirt.live.proxmox.freeze", access, vm_id)


def _hold(order: dict[str, Any]) -> None:
    place, login, options = FORM.read(holding.access_of(order))
    api, vm_id = Api(place, login, options), str(order["vm_id"])
    api.open()
    try:
        limit_s = THAW_MOST_S
        try:
            Cluster(api).freeze(vm_id)
            holding.while_wanted()
        except Internal as error:
            limit_s = 0.0  # its agent is missing, or refuses
            holding.say(error.detail)
        except SynvirtError as error:
            holding.say(error.detail)  # it may still freeze later
        finally:
            thaw(api, vm_id, limit_s)
    finally:
        api.close()


def thaw(api: Api, vm_id: str, limit_s: float) -> None:
    """At least once, and until it is thawed; with a new session where the old one is lost."""

    def thawed() -> bool:
        try:
            api.open()
            Cluster(api).thaw(vm_id)
        except VmNotFound:
            return True
        except Exception:
            api.close()
            return False
        return True

    holding.thaw_until_done(thawed, limit_s)


if __name__ == "__main__":
    holding.main(_hold)
