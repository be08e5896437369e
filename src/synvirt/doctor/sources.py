"""Whether the platforms and files can be read that VMs come from."""

from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

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


def libsmbclient(_: Settings) -> str:
    """Samba's library, looked for by its file: only a process of its own may load it. Missing."""
    places = (Path("/usr").glob(f"{libraries}/libsmbclient.so.0") for libraries in ("lib*", "lib*/*"))
    if (found := next(chain.from_iterable(places), None)) is None:
        raise Missing("libsmbclient is not installed")
    return str(found)


def libyal(_: Settings) -> str:
    """The libraries that read a guest's disks, found without loading them. Missing."""
    missing = [name for name in ("pyfsext", "pyfsxfs", "pyfsntfs", "pyregf") if find_spec(name) is None]
    if missing:
        raise Missing(f"Python has no module {', '.join(missing)}")
    return "found"


def hyperv_tool(settings: Settings) -> str:
    """The tool for Hyper-V exports and its driver. Missing."""
    command, driver = settings.vmcx_tool, settings.vmcx_tool_driver
    program_path(command)
    if settings.vmcx_way != "tool" and not vmcx_tool(settings).has_driver():
        raise Missing(f"{command} is here, but lists no input driver {driver}")
    return f"{command} -i {driver}"
