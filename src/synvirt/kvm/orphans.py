"""What the embedded driver began and nothing ends, because the service was killed at the wrong moment.

    QEMU with no machine, by which libvirt learns what QEMU can do: it is detached and waits for questions without end
    swtpm of a guest that was never started: its QEMU would have ended it; and swtpm_setup, which would go on making its state
    the state of a TPM whose guest is not defined any more
    files of a start that was cut off before there was a process, or files of a swtpm that was killed: libvirt removes only
    those of guests that it knows to run
    the copy of a firmware's variables that was not whole yet: libvirt writes it beside its place
    the pid file of a guest of which libvirt had no record yet, and whose QEMU has ended with the service, also before it had a
    number

The processes are known by the paths in their arguments, which lie in the driver's own folder.
"""

import contextlib
import os
import re
import select
import shutil
import signal
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from synvirt.kvm.identity import DRIVER

# For a killed process on an overloaded host.
ENDS_WITHIN_S = 10


@dataclass(frozen=True, slots=True)
class Orphan:
    """`guest`: the UUID of the domain that it may belong to; None, where it belongs to none."""

    pid: int
    guest: str | None


def suspects(root: Path) -> list[Orphan]:
    """The processes of the driver with this folder, given as it was passed to libvirt. Look before the driver is opened: what
    begins later is no orphan."""
    processes = (int(entry.name) for entry in Path("/proc").glob("[0-9]*"))
    return [orphan for pid in processes if (orphan := _suspect(pid, root)) is not None]


def end(orphans: list[Orphan], root: Path, is_active: Callable[[str], bool]) -> None:
    """Call it once the driver is open. If a process has ended and another has its number now, that one is left alone."""
    for orphan in orphans:
        if _suspect(orphan.pid, root) == orphan and (orphan.guest is None or not is_active(orphan.guest)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(orphan.pid, signal.SIGKILL)


def forget_tpm(root: Path, guest: str) -> None:
    """Removes the state of the TPM of a guest that is not defined any more. OSError.

    libvirt removes it after the definition, so a service that is killed between the two leaves it; and libvirt gives up where a
    swtpm_setup still writes there, which is ended here.
    """
    folder = root / "lib/swtpm" / guest
    if not folder.exists():
        return
    for orphan in suspects(root):
        if orphan.guest == guest:
            _end_and_wait(orphan.pid)
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _end_and_wait(pid: int) -> None:
    """A process that is killed may still be in the middle of a write."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        process = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            select.select([process], [], [], ENDS_WITHIN_S)
        finally:
            os.close(process)


# A guest's folder is domain-NUMBER-NAME; the socket and the pid file of its swtpm are NUMBER-NAME-swtpm.… Each start has
# another number (libvirt's virDomainDefGetShortName).
_OF_A_START = re.compile(r"domain-([0-9]+)-.*|([0-9]+)-.*-swtpm\.(?:pid|sock)", re.DOTALL)
HALF_WRITTEN = "lib/qemu/nvram/*_VARS.fd.new"
PID_FILES = "run/qemu/*.pid"
# The driver's own, which it has locked. A process that opens and closes a file loses its lock on it (fcntl(2)): then a second
# service could open the folder.
DRIVERS_PID_FILE = f"{DRIVER}.pid"


def traces(root: Path) -> list[Path]:
    """Files of guests' starts. Look before the driver is opened, as for the processes."""
    places = (root / "lib/qemu", root / "lib/qemu/channel/target", root / "run/swtpm")
    of_starts = [path for place in places for path in place.glob("*-*") if _OF_A_START.fullmatch(path.name)]
    pid_files = (path for path in root.glob(PID_FILES) if path.name != DRIVERS_PID_FILE)
    return [*of_starts, *root.glob(HALF_WRITTEN), *(path for path in pid_files if not _runs(path))]


def remove(left: list[Path], active: Collection[int]) -> None:
    """Removes those of guests that do not run; one that cannot be removed disturbs nobody. `active`: the numbers of the running
    ones, once the driver is open."""
    for path in left:
        if _is_used(path, active):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_used(path: Path, active: Collection[int]) -> bool:
    """Whether the file is of a guest that runs: for a pid file, one that was started since it was found."""
    if path.match(PID_FILES):
        return _runs(path)
    found = _OF_A_START.fullmatch(path.name)
    return found is not None and int(found[1] or found[2]) in active


def _runs(pid_file: Path) -> bool:
    """Whether a process has the number in the file; also True, where it is no number. An empty file is of a start that was cut
    off in the middle: libvirt, which writes the number at once, has had the time to open the driver between our two looks."""
    try:
        number = pid_file.read_text()
        return bool(number) and Path(f"/proc/{int(number)}").exists()
    except (OSError, ValueError):
        return True


def _suspect(pid: int, root: Path) -> Orphan | None:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return None
    program = os.fsencode(Path(os.fsdecode(arguments[0])).name)
    command = b" ".join(arguments)
    folder = re.escape(os.fsencode(root))
    if program.startswith(b"qemu-system") and b"none,accel=" in command and re.search(folder + rb"/lib/qemu/qmp-", command):
        return Orphan(pid, None)
    if program in (b"swtpm", b"swtpm_setup") and (state := re.search(folder + rb"/lib/swtpm/([0-9a-f-]{36})/", command)):
        return Orphan(pid, state[1].decode())
    return None
