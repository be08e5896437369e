"""The process that freezes a guest of a libvirt host (holding.py): `python -m synvirt.live.libvirt.freeze`."""

from contextlib import AbstractContextManager
from typing import Any

from synvirt.errors import Internal
from synvirt.live import SourceAccess, holding
from synvirt.live.holding import FROZEN_MOST_S, THAW_MOST_S, Hold
from synvirt.live.libvirt import domain as domains
from synvirt.live.libvirt.form import FORM
from synvirt.live.libvirt.host import Host, library

__all__ = ["FROZEN_MOST_S", "Hold", "frozen"]


def frozen(access: SourceAccess, vm_id: str) -> AbstractContextManager[Hold]:
    return holding.frozen("synvirt.live.libvirt.freeze", access, vm_id)


def _hold(order: dict[str, Any]) -> None:
    place, login, options = FORM.read(holding.access_of(order))
    host = Host(place, login, options)
    host.open()
    try:
        domain = host.connection.lookupByUUIDString(order["vm_id"])
        if not domains.may_freeze(domain):
            raise Internal("its agent does not answer")
        limit_s = THAW_MOST_S
        try:
            domains.freeze(domain)
            holding.while_wanted()
        except library().libvirtError as error:
            if domains.agent_refused(error):
                limit_s = 0.0
            holding.say(str(error))
        finally:
            _thaw(host, order["vm_id"], limit_s)
    finally:
        host.close()


def _thaw(host: Host, vm_id: str, limit_s: float) -> None:
    """At least once; with a new connection where the old one is lost."""

    def thawed() -> bool:
        try:
            host.open()
            return domains.thaw(host.connection.lookupByUUIDString(vm_id))
        except Exception as error:
            if isinstance(error, library().libvirtError) and error.get_error_code() == library().VIR_ERR_NO_DOMAIN:
                return True
            host.close()
            return False

    holding.thaw_until_done(thawed, limit_s)


if __name__ == "__main__":
    holding.main(_hold, library().libvirtError)
