"""Windows guests get their virtio drivers from virt-v2v-in-place, which knows every version of Windows.

    overlays of the volumes ─▶ a libvirt domain ─▶ virt-v2v-in-place -i libvirtxml ─▶ the overlays, with drivers

The tool opens the guest's disks in its own appliance (libguestfs); nothing of the guest runs on the host. The tool and all that
it starts are in a cage (`cage/appliance.py`). It succeeds even if it found no driver, or not the one for the network, so its
messages are read: virt-v2v(1), section «Machine readable output», has their form.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final, get_args
from xml.etree import ElementTree as ET

from synvirt.cage import Network
from synvirt.cage.appliance import CACHE, converter, shown_kernel
from synvirt.cage.scratch import scratch_folder
from synvirt.errors import V2vFailed
from synvirt.guests import OnMessage, overlays
from synvirt.guests.driver_folder import unpacked
from synvirt.guests.driver_image import Unreadable, top_names
from synvirt.machines.disk_drivers import finds_no_disk
from synvirt.model.job import MessageKind
from synvirt.model.machine import VmManifest, letters
from synvirt.programs import ProgramFailed, end_users, find, inherited, run

PROGRAM = "virt-v2v-in-place"
# A conversion takes 2 to 5 minutes; on a slow pool without KVM it took 20.
TIMEOUT_S = 3600
# Variables by which an administrator sets up libguestfs: a kernel and its parameters, a folder with space, more memory.
ENVIRONMENT = (
    "LIBGUESTFS_APPEND",
    "LIBGUESTFS_CACHEDIR",
    "LIBGUESTFS_MEMSIZE",
    "LIBGUESTFS_PATH",
    "SUPERMIN_KERNEL",
    "SUPERMIN_KERNEL_VERSION",
    "SUPERMIN_MODULES",
)
# For libguestfs where there is no KVM. QEMU translates the appliance's code: a second virtual processor and the kernel's work
# against Spectre cost a fifth of the time. The appliance's programs all belong to one user, who could gain nothing. The kernel
# must not believe that string instructions are fast: QEMU translates them piece by piece, another twentieth. A fifth
# of its start is tests of its own ciphers, which cryptomgr.notests leaves out; noreplace-smp leaves out changing 9,000 of its
# instructions for a single processor.
TRANSLATED = {
    "LIBGUESTFS_BACKEND_SETTINGS": "force_tcg",
    "LIBGUESTFS_APPEND": "nr_cpus=1 mitigations=off clearcpuid=erms,fsrm,rep_good cryptomgr.notests noreplace-smp",
}
# One of these programs starts the installer of the guest agent when Windows boots.
SERVICE_STARTERS = ("rhsrvany.exe", "pvvxsvc.exe")
# ISO 9660 without Joliet has no hyphen in names.
AGENT_FOLDERS = {"guest-agent", "guest_agent"}

# The tool's messages, and hints for an operator. The first match counts.
_CAUSES = (
    ("hibernat", "start Windows on the source, turn Fast Startup off (powercfg /h off), shut it down and start the job again"),
    (
        "could not read key",
        "a volume is encrypted: suspend BitLocker (manage-bde -protectors -disable) on the source, then copy again",
    ),
    ("no virtio drivers available", "this virtio-win.iso has no driver for this Windows: use a newer or an older one"),
    (
        "there is no virtio",
        "use another virtio-win.iso, or none of its drivers: --conversion never --disk-bus sata, by which cards are e1000e",
    ),
    ("no operating system", 'no system that it knows was found on the disks: set "conversion" to "never" if that is so'),
    ("no installed kernel packages", "this virt-v2v is too old for the guest: a RHEL 9 needs 2.4 or newer"),
    ("not enough free space", "make room inside the guest and copy it again"),
    ("rhsrvany", "put rhsrvany.exe (https://github.com/rwmjones/rhsrvany) where the setting virt_tools_dir says"),
    ("read-only", "the file system was not shut down cleanly: start Windows on the source and shut it down"),
    (
        "was ended by sig",
        "something on this host ended it, for example as memory was short (journalctl -k): start the job again",
    ),
    ("took too long", "look at what else this host does, and whether /dev/kvm is there: without it a conversion is slow"),
)
# Devices that are no overlays.
ALONE: Final[Mapping[str, str]] = MappingProxyType({})
_WITHOUT_DRIVERS = "does not have virtio drivers installed"
_WITHOUT_NETWORK = "there is no virtio network driver"


class VirtV2vInPlace:
    """`iso`: the virtio driver image, or a folder with the same content; the default is the path of Fedora's virtio-win package
    (specification part 1). `folder`: for the overlays; `virt_tools`: the helper programs that go into the guest."""

    tool: ClassVar[str] = PROGRAM

    def __init__(
        self,
        folder: Path,
        iso: Path = Path("/usr/share/virtio-win/virtio-win.iso"),
        virt_tools: Path = Path("/usr/share/virt-tools"),
        *,
        kvm: Callable[[], bool],
    ) -> None:
        self._folder = folder
        self._iso = iso
        self._virt_tools = virt_tools
        self._kvm = kvm

    def wants(self, manifest: VmManifest) -> bool:
        """A Windows; a Linux only where this host has the tool, as it need not be here for others."""
        return manifest.guest_os.family == "windows" or (finds_no_disk(manifest) and find(PROGRAM) is not None)

    def check(self, manifest: VmManifest) -> None:
        if find(PROGRAM) is None:
            raise V2vFailed(f"{PROGRAM} is not installed, which a conversion needs", hint="apt-get install virt-v2v")
        if _has_its_drivers(manifest):
            return
        try:
            self._check_files()
        except OSError as error:
            raise V2vFailed(
                f"{Path(error.filename or self._iso).name} cannot be read, and a conversion needs it: {error.strerror}",
                hint="let the service's user read what the settings virtio_win_iso and virt_tools_dir name",
            ) from error

    def _check_files(self) -> None:
        if not self._iso.exists():
            raise V2vFailed(
                f"the virtio driver image {self._iso.name} is missing, and a Windows guest cannot start from virtio disks "
                "without drivers",
                hint="put virtio-win.iso where the setting virtio_win_iso says",
            )
        if AGENT_FOLDERS & top_names(self._iso) and not any((self._virt_tools / name).exists() for name in SERVICE_STARTERS):
            raise V2vFailed(
                f"{self._iso.name} brings a guest agent, and its installer is missing: {' or '.join(SERVICE_STARTERS)}",
                hint="put rhsrvany.exe (https://github.com/rwmjones/rhsrvany) where the setting virt_tools_dir says",
            )

    def convert(
        self,
        name: str,
        manifest: VmManifest,
        devices: list[str],
        on_message: OnMessage,
        stop: Callable[[], bool],
        *,
        backing: Mapping[str, str] = ALONE,
    ) -> None:
        self.check(manifest)
        with _as_our_error(manifest), self._drivers(manifest, on_message, stop) as drivers, scratch_folder("v2v") as work:
            laid = overlays.lay(self._folder / name, devices, backing)
            shown = {str(drivers): self._iso.name, str(self._iso): self._iso.name, str(self._folder / name): name}
            messages = _Messages(on_message, shown)
            domain = work / "guest.xml"
            domain.write_bytes(_domain(manifest, laid))
            env = {**self._environment(), "VIRTIO_WIN": str(drivers), "TMPDIR": str(work), "XDG_RUNTIME_DIR": str(work)}
            read = [path for device in devices for path in overlays.chain(device, backing)]
            argv = _caged(domain, self._folder / name, read, env)
            try:
                run(
                    argv,
                    timeout_s=TIMEOUT_S,
                    env=env,
                    stop=stop,
                    on_line=messages.line,
                    guarded=True,
                    name=PROGRAM,
                    missing=V2vFailed,
                )
            except ProgramFailed as error:
                said = messages.last("error") or _last_line(error.stderr) or error.detail
                raise _failed(manifest, f"{PROGRAM} {error.cut_off}" if error.cut_off else said) from error
            finally:
                end_users(self._folder / name)
            overlays.keep(self._folder / name, laid)
        if messages.that_contains(_WITHOUT_DRIVERS) is not None:
            raise _failed(manifest, messages.last("warning") or messages.last("info") or "no driver was installed")
        if _needs_network_driver(manifest) and (warning := messages.that_contains(_WITHOUT_NETWORK)) is not None:
            raise _failed(manifest, warning)

    def adopt(self, name: str, devices: list[str], *, backing: Mapping[str, str] = ALONE) -> None:
        overlays.take_over(self._folder / name, devices, backing)

    def discard(self, name: str) -> None:
        overlays.remove(self._folder / name)

    @contextmanager
    def _drivers(self, manifest: VmManifest, on_message: OnMessage, stop: Callable[[], bool]) -> Iterator[Path]:
        """A folder with the drivers; the image itself, where it is not needed, or where it cannot be unpacked here: the tool
        reads it too, slowly."""
        with ExitStack() as held:
            drivers = self._iso
            if not _has_its_drivers(manifest) and not self._iso.is_dir():
                try:
                    drivers = held.enter_context(
                        unpacked(self._iso, self._folder.with_name("drivers"), overlays.ROOM_BYTES, stop)
                    )
                except (Unreadable, OSError) as error:
                    cause = error.strerror if isinstance(error, OSError) else error
                    on_message("info", f"{self._iso.name} was not unpacked, so the conversion takes longer: {cause}")
            yield drivers

    def _environment(self) -> dict[str, str]:
        cache = self._folder.with_name("appliance")
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        return {
            CACHE: str(cache),
            **shown_kernel(),
            **({} if self._kvm() else TRANSLATED),
            **inherited(ENVIRONMENT),
            "LIBGUESTFS_BACKEND": "direct",
            "VIRT_TOOLS_DATA_DIR": str(self._virt_tools),
        }


def _has_its_drivers(manifest: VmManifest) -> bool:
    """They are part of each Linux kernel: its initramfs is made again with them."""
    return manifest.guest_os.family == "linux"


def _needs_network_driver(manifest: VmManifest) -> bool:
    """Its cards are virtio's here, whatever they were: without the driver it would boot, and have no network."""
    return any(not nic.model.lower().startswith("virtio") for nic in manifest.nics)


def _caged(domain: Path, folder: Path, devices: list[str], env: dict[str, str]) -> list[str]:
    """The command in a cage: it may write only the overlays, and read the volumes, some of them over a network
    (`rbd:…:conf=PATH`)."""
    files = [device for device in devices if device.startswith("/")]
    pools = [device for device in devices if device not in files]
    confs = [str(Path(one.rpartition("conf=")[2].replace("\\:", ":")).parent) for one in pools if "conf=" in one]
    return converter(
        # Of several systems the first one: it would ask which, and nobody answers.
        [PROGRAM, "--machine-readable=stream:stdout", "--root", "first", "-i", "libvirtxml", str(domain)],
        reads=[*files, *confs],
        writes=[str(folder), str(domain.parent)],
        environment=env,
        network=Network.ANY if pools else Network.LOCAL,
    )


class _Messages:
    """The tool's messages, passed on as they come, without paths of this host."""

    def __init__(self, on_message: OnMessage, shown: Mapping[str, str]) -> None:
        """`shown`: what stands for a path."""
        self._on_message = on_message
        self._shown = shown
        self._messages: list[tuple[MessageKind, str]] = []

    def line(self, line: str) -> None:
        """Takes a line of standard output: JSON, or text for a terminal that repeats it."""
        try:
            record = json.loads(line)
            kind, text = record["type"], str(record["message"])
        except (ValueError, TypeError, KeyError):
            return
        if kind not in get_args(MessageKind):
            return
        for path, name in self._shown.items():
            text = text.replace(path, name)
        self._messages.append((kind, text))
        self._on_message(kind, text)

    def last(self, kind: MessageKind) -> str | None:
        return next((text for one, text in reversed(self._messages) if one == kind), None)

    def that_contains(self, words: str) -> str | None:
        return next((text for _, text in self._messages if words in text), None)


@contextmanager
def _as_our_error(manifest: VmManifest) -> Iterator[None]:
    """V2vFailed instead of an OSError: a folder of the conversion cannot be made, for example as its file system is full."""
    try:
        yield
    except OSError as error:
        raise V2vFailed(
            f"{manifest.name} was not converted: {error.strerror or type(error).__name__}",
            hint="look at the file systems of the service's folder and of temporary files, and start the job again",
        ) from error


def _failed(manifest: VmManifest, cause: str) -> V2vFailed:
    hint = next((hint for words, hint in _CAUSES if words in cause.lower()), None)
    return V2vFailed(f"{manifest.name} was not converted: {' '.join(cause.split())}", hint=hint)


def _last_line(stderr: str) -> str | None:
    """The last message of the tool. Its own begin with its name; those of a library may not."""
    lines = [line for line in stderr.splitlines() if line.startswith(f"{PROGRAM}: ")]
    return lines[-1].removeprefix(f"{PROGRAM}: ") if lines else None


def _domain(manifest: VmManifest, disks: list[Path]) -> bytes:
    """The domain XML for the tool: the guest's disks in order, its memory and its firmware. Not the VM's own name, which the
    tool does not use: it may have characters that XML forbids."""
    domain = ET.Element("domain", type="kvm")
    ET.SubElement(domain, "name").text = "guest"
    ET.SubElement(domain, "memory", unit="b").text = str(manifest.memory_bytes)
    ET.SubElement(domain, "vcpu").text = str(manifest.cpu_count)
    os_element = ET.SubElement(domain, "os", firmware="efi") if manifest.firmware == "uefi" else ET.SubElement(domain, "os")
    ET.SubElement(os_element, "type", arch="x86_64").text = "hvm"
    devices = ET.SubElement(domain, "devices")
    for number, path in enumerate(disks):
        disk = ET.SubElement(devices, "disk", type="file", device="disk")
        ET.SubElement(disk, "driver", name="qemu", type="qcow2")
        ET.SubElement(disk, "source", file=str(path))
        ET.SubElement(disk, "target", dev=f"sd{letters(number)}", bus="sata")
    return ET.tostring(domain)
