"""Whether the platforms and files can be read that VMs come from."""

from importlib import metadata

from synvirt.doctor.finding import Missing, first_line, program_path
from synvirt.offline.hyperv.tool import vmcx_tool
from synvirt.programs import ProgramFailed
from synvirt.settings import Settings


def libnbd_version() -> str:
    """The version of libnbd. ImportError."""
    import nbd

    return f"libnbd {nbd.NBD().get_version()}"


def pyvmomi_version() -> str:
    # Looked for and not loaded: it takes a while, and memory.
    return f"pyvmomi {metadata.version('pyvmomi')}"


def nbdkit_vddk(_: Settings) -> str:
    """The version of nbdkit's vddk plugin. Missing."""
    program_path("nbdkit")
    try:
        return first_line(["nbdkit", "vddk", "--version"])
    except ProgramFailed as error:
        raise Missing("nbdkit has no plugin vddk") from error


def libnfs(_: Settings) -> str:
    """The library of NFS, and its version. Missing."""
    from synvirt.disks.nfs import found

    return found()


def hyperv_tool(settings: Settings) -> str:
    """The tool for Hyper-V exports and its driver. Missing."""
    command, driver = settings.vmcx_tool, settings.vmcx_tool_driver
    program_path(command)
    if settings.vmcx_way != "tool" and not vmcx_tool(settings).has_driver():
        raise Missing(f"{command} is here, but lists no input driver {driver}")
    return f"{command} -i {driver}"
