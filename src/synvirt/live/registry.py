"""The platforms, one line each. Every one is served under its kind, and is in the contract suite."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from synvirt.live import LiveAdapter, SourceAccess
from synvirt.live.form import Form
from synvirt.live.hyperv.adapter import FORM as WMI_API
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.live.libvirt.adapter import FORM as LIBVIRT_REMOTE
from synvirt.live.libvirt.adapter import libvirt_remote
from synvirt.live.nutanix.adapter import FORM as PRISM_API
from synvirt.live.nutanix.adapter import PrismApi
from synvirt.live.proxmox.adapter import FORM as PVE_API
from synvirt.live.proxmox.adapter import pve_api
from synvirt.live.vsphere.adapter import VimApi
from synvirt.live.vsphere.form import FORM as VIM_API
from synvirt.live.xen.adapter import FORM as XEN_API
from synvirt.live.xen.adapter import XenApi
from synvirt.model.kinds import LiveKind


@dataclass(frozen=True, slots=True)
class Platform:
    """`form`: the settings of a source. `open`: makes its adapter, without a connection; BadRequest, where the access does not
    fit the form. `ids_stay`: a VM keeps its id, a UUID, on the host of another source."""

    form: Form[Any, Any]
    open: Callable[[SourceAccess], LiveAdapter]
    ids_stay: bool = False

    @property
    def kind(self) -> LiveKind:
        return self.form.kind


PLATFORMS: tuple[Platform, ...] = (
    Platform(VIM_API, VimApi),
    Platform(WMI_API, WmiApi),
    Platform(PVE_API, pve_api),
    Platform(LIBVIRT_REMOTE, libvirt_remote, ids_stay=True),
    Platform(XEN_API, XenApi),
    Platform(PRISM_API, PrismApi),
)

BY_KIND: Mapping[LiveKind, Platform] = MappingProxyType({platform.kind: platform for platform in PLATFORMS})
