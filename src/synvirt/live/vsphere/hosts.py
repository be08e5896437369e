"""Checks the ESXi hosts behind a vCenter from here: by name, by port, by certificate. Blocking code.

The host with the VM sends an export lease, and VDDK reads from it. The files of a datastore come from a host that has it, or
through vCenter.
"""

import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

from synvirt import outgoing
from synvirt.errors import BadRequest
from synvirt.live.vsphere.machines import shown
from synvirt.live.vsphere.session import VimSession, library
from synvirt.model.sources import SourceCheck
from synvirt.transport import tls

# A cluster has at most 96; of more, only the first are checked.
HOSTS_MAX: Final = 96
AT_ONCE: Final = 16
HTTPS_PORT: Final = 443
# VMware's NFC, which VDDK uses.
VDDK_PORT: Final = 902
CONNECT_TIMEOUT_S: Final = 5.0
_PATHS: Final = ("name", "runtime.connectionState", "summary.config.product", "summary.config.sslThumbprint")
_SHA1_CHARS: Final = len("00:" * 20) - 1
_HINT: Final = "an export lease, VDDK and transport esxi need it; files that are read by vCenter do not"


def checks(session: VimSession, *, by_vddk: bool) -> list[SourceCheck]:
    """One check per host; none, where the source is a host itself. Errors are warnings, as there is another way."""
    if str(session.content.about.apiType) != "VirtualCenter":
        return []
    found = session.all_of([library().vim.HostSystem], _PATHS, what="look for its hosts")[:HOSTS_MAX]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="host") as pool:
        return list(pool.map(lambda one: _check(one.properties, by_vddk=by_vddk), found))


def _check(host: Mapping[str, Any], *, by_vddk: bool) -> SourceCheck:
    name = shown(host.get("name") or "")
    product = host.get("summary.config.product")
    product_name = f"{getattr(product, 'name', None) or 'ESXi'} {getattr(product, 'version', None) or ''}".strip()
    trouble = None
    if (state := str(host.get("runtime.connectionState"))) != "connected":
        trouble = f"vCenter calls it {state}"
    trouble = trouble or _from_here(name, str(host.get("summary.config.sslThumbprint") or ""), by_vddk=by_vddk)
    return SourceCheck(
        name=f"host {name}",
        ok=True,
        warning=trouble is not None,
        detail=f"{product_name}: {trouble or 'its name, its ports and its certificate are as they should be'}",
        hint=None if trouble is None else _HINT,
    )


def _from_here(name: str, thumbprint: str, *, by_vddk: bool) -> str | None:
    """The fault, if any."""
    try:
        der = tls.look(name, HTTPS_PORT).der
    except BadRequest as error:
        return error.detail
    except socket.gaierror:
        return "its name does not resolve to an address here"
    except OSError as error:
        return f"port {HTTPS_PORT} shows no certificate: {error.strerror or type(error).__name__}"
    digest = "SHA-1" if len(thumbprint) <= _SHA1_CHARS else "SHA-256"
    if thumbprint and tls.fingerprint(der, digest) != thumbprint.upper():
        return f"it shows another certificate than the one that vCenter has ({digest} {thumbprint})"
    if by_vddk:
        try:
            outgoing.sources().dial(name, VDDK_PORT, timeout_s=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            return f"port {VDDK_PORT} accepts no connection: {error.strerror or type(error).__name__}"
    return None
