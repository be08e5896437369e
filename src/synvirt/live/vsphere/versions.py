"""Chooses the version of a vSphere's API. Blocking code.

    GET /sdk/vimServiceVersions.xml ─▶ namespace urn:vim25: its version, and earlier ones that it supports

«vSphere Web Services SDK Programming Guide». All that we call and read is in 6.5, and a newer version would only send more that
an older pyvmomi cannot read. So the oldest one from 6.5 on that both sides have is used. With a platform without such a list it
is 6.5; then the first call gives a better error.
"""

import http.client
import ssl
from collections.abc import Container, Iterable
from typing import Final

from synvirt.errors import SynvirtError, UnsupportedFormat
from synvirt.transport import https
from synvirt.xml_document import children, parse, text

OLDEST: Final = "6.5"
PATH: Final = "/sdk/vimServiceVersions.xml"
_NAMESPACE: Final = "urn:vim25"
# A vCenter's list has some forty versions, in 2 KiB.
_BYTES_MAX: Final = 256 << 10
_NUMBERS_MAX: Final = 8
_DIGITS_MAX: Final = 9


def listed(host: str, port: int, trust: ssl.SSLContext, timeout_s: float) -> list[str]:
    """The platform's versions, the newest first; none, where it has no such list. OSError, HTTPException."""
    connection = https.Connection(host, port, timeout=timeout_s, context=trust)
    try:
        connection.request("GET", PATH)
        answer = connection.getresponse()
        content = answer.read(_BYTES_MAX)
    finally:
        connection.close()
    if answer.status != http.client.OK:
        return []
    try:
        root = parse(content, PATH)
    except SynvirtError:
        return []
    return [
        (version.text or "").strip()
        for namespace in children(root, "namespace")
        if text(namespace, "name") == _NAMESPACE
        for holder in (namespace, *children(namespace, "priorVersions"))
        for version in children(holder, "version")
    ]


def chosen(host: str, theirs: Iterable[str], ours: Container[str]) -> str:
    """The oldest common version from 6.5 on. UnsupportedFormat, where there is none: the platform is older, or much newer."""
    spoken = [(number, version) for version in theirs if (number := _number(version)) is not None]
    if not spoken:
        return OLDEST
    # The API's own numbers: 6.5, 6.7.3, 7.0.3.0, 8.0.2.0.
    common = [one for one in spoken if one[0] >= (6, 5) and one[1] in ours]
    if common:
        return min(common)[1]
    newest = max(spoken)
    if newest[0] < (6, 5):
        raise UnsupportedFormat(
            f"{host} has vSphere's API up to {newest[1]}; what is needed came with {OLDEST}",
            hint="upgrade it, or add its ESXi hosts of 6.5 or later as sources of their own; or copy the VM's files",
        )
    raise UnsupportedFormat(
        f"{host} has vSphere's API from {min(spoken)[1]} on, and our pyvmomi no such version",
        hint="install a newer pyvmomi, or a newer release of this service",
    )


def _number(version: str) -> tuple[int, ...] | None:
    """None, where it is not made of digits and dots: «2.5u2», the names of internal versions."""
    parts = version.split(".")
    if len(parts) > _NUMBERS_MAX or not all(part.isascii() and part.isdigit() and len(part) <= _DIGITS_MAX for part in parts):
        return None
    return tuple(map(int, parts))
