"""Translates a Windows path to a share and a name in it, and a disk's chain of files to a reader. No I/O.

D:\\VMs\\web\\web.vhdx                         //host/D$   VMs/web/web.vhdx        the administrative share
C:\\ClusterStorage\\Volume1\\web\\web.vhdx      //node/C$   ClusterStorage/…        a cluster's shared volume, by its node
\\\\files\\vms\\web.vhdx                        //files/vms web.vhdx                if Hyper-V itself has it on a share
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import quote

from synvirt import outgoing
from synvirt.disks.specs import ImageFormat, ImageSpec, RawSpec, ReaderSpec
from synvirt.errors import UnsupportedFormat
from synvirt.remote import Remote

# VhdFormat of Hyper-V's cmdlets: 2 VHD, 3 VHDX; 4, a VHD set, is for disks that several VMs share.
_FORMATS: Final[Mapping[int, ImageFormat]] = {2: "vhd", 3: "vhdx"}
_DRIVE: Final = re.compile(r"([A-Za-z]):\\(.+)")
_UNC: Final = re.compile(r"\\\\(?:\?\\UNC\\)?([^\\?.][^\\]*)\\([^\\]+)\\(.+)")
_PREFIX: Final = "\\\\?\\"
_SHARES_HINT: Final = "options.shares names a share for a folder of the host: D:\\VMs=vms"


@dataclass(frozen=True, slots=True)
class Place:
    """`host`: None is the Hyper-V host itself. `name`: with slashes, under the share."""

    host: str | None
    share: str
    name: str

    @property
    def shown(self) -> str:
        return f"\\\\{self.host or 'the host'}\\{self.share}"


@dataclass(frozen=True, slots=True)
class Shares:
    """How to reach files of one Hyper-V host. `named`: the shares of the host's folders, from options.shares."""

    host: str
    port: int
    user: str
    password: str = field(repr=False)
    named: Mapping[str, str] = field(default_factory=dict)

    def place(self, path: str) -> Place:
        """UnsupportedFormat, where no share leads to it."""
        plain = path.removeprefix(_PREFIX) if not path.upper().startswith("\\\\?\\UNC\\") else path
        lower = plain.lower()
        folders = sorted(self.named, key=len, reverse=True)
        for folder in folders:
            stem = folder.rstrip("\\").lower() + "\\"
            if lower.startswith(stem):
                return Place(None, self.named[folder], _slashes(plain[len(stem) :]))
        if (found := _DRIVE.fullmatch(plain)) is not None:
            return Place(None, f"{found[1].upper()}$", _slashes(found[2]))
        if (found := _UNC.fullmatch(plain)) is not None:
            return Place(found[1], found[2], _slashes(found[3]))
        raise UnsupportedFormat(f"{path[:300]!r} is not a file of a drive or a share", hint=_SHARES_HINT)

    def remote(self, place: Place, *, frozen: bool = False, named: bool = False) -> Remote:
        """`named`: the operator named it, and not an answer of Hyper-V."""
        host = place.host or self.host
        authority = f"[{host}]" if ":" in host else host
        domain, backslash, user = self.user.rpartition("\\")
        credentials = [("username", user), ("password", self.password), *([("domain", domain)] if backslash else [])]
        return Remote(
            url=f"smb://{authority}:{self.port}/{quote(place.share, safe='$')}/",
            credentials=tuple(credentials),
            # The operator named this host. A host that Hyper-V names must not be an address of this machine, unless an operator
            # says where sources may be.
            of_source=named or place.host is None or bool(outgoing.permitted()),
            frozen=frozen,
        )

    def reader(self, chain: Sequence[Mapping[str, Any]], *, frozen: bool = False) -> ReaderSpec:
        """The reader of a disk: its newest file, and its parents, all in one share; `frozen`: under a snapshot.
        UnsupportedFormat."""
        for one in chain:
            if one.get("error"):
                raise UnsupportedFormat(f"{one['path']}: Hyper-V cannot inspect it: {str(one['error'])[:300]}")
        places = [self.place(str(one["path"])) for one in chain]
        top = places[0]
        elsewhere = next((one for one in places[1:] if _share(one) != _share(top)), None)
        if elsewhere is not None:
            raise UnsupportedFormat(
                f"{chain[0]['path']} lies over {elsewhere.name} in {elsewhere.shown}: a chain over several shares is not read",
                hint=f"merge its checkpoints, or share a folder that holds all its files. {_SHARES_HINT}",
            )
        image = _FORMATS.get(int(chain[0].get("format") or 0))
        if image is None:
            raise UnsupportedFormat(f"{chain[0]['path']} is neither VHD nor VHDX", hint="VHD sets are shared disks")
        remote = self.remote(top, frozen=frozen)
        return ImageSpec(format=image, over=RawSpec(path=top.name, remote=remote), root=remote, name=top.name)


def _share(place: Place) -> tuple[str, str]:
    return (place.host or "").lower(), place.share.lower()


def _slashes(path: str) -> str:
    return path.replace("\\", "/")
