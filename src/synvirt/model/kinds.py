"""Kinds of sources, modes and states (specification parts 1 to 3; spellings: part 2)."""

from enum import StrEnum


class LiveKind(StrEnum):
    """Kinds of platforms that VMs are read from while they exist there (specification part 2)."""

    VIM_API = "vim_api"
    WMI_API = "wmi_api"
    PVE_API = "pve_api"
    LIBVIRT_REMOTE = "libvirt_remote"
    XEN_API = "xen_api"
    PRISM_API = "prism_api"


class OfflineKind(StrEnum):
    """Kinds of files that VMs are imported from (specification part 2)."""

    OVA_ARCHIVE = "ova_archive"
    OVF_FOLDER = "ovf_folder"
    VMX_FOLDER = "vmx_folder"
    VHDX = "vhdx"
    QCOW2 = "qcow2"
    VMDK = "vmdk"
    VMCX_EXPORT = "vmcx_export"
    VBOX_FOLDER = "vbox_folder"
    XVA_ARCHIVE = "xva_archive"


class Mode(StrEnum):
    """Warm: the guest runs while it is copied. Cold: it is shut down first."""

    WARM = "Warm"
    COLD = "Cold"


class State(StrEnum):
    """States of a migration; Completed, Failed and Cancelled are its ends (specification part 3)."""

    QUEUED = "Queued"
    COPYING_FULL = "CopyingFull"
    DELTA_SYNCING = "DeltaSyncing"
    CUTTING_OVER = "CuttingOver"
    V2V_PROCESSING = "V2vProcessing"
    STARTING = "Starting"
    COMPLETED = "Completed"
    FAILED = "Failed"
    CANCELLED = "Cancelled"


ENDS = frozenset({State.COMPLETED, State.FAILED, State.CANCELLED})
UNENDED = tuple(state for state in State if state not in ENDS)
