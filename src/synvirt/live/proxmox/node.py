"""A node of the cluster, by SSH: a fixed list of commands, and Unix sockets forwarded. Blocking code.

Only the commands in COMMANDS run there. Each is an argv with gaps, and a gap's pattern allows nothing with a meaning for a
shell. docs/platforms/proxmox.md has the forced command that limits a key to these.
"""

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from synvirt.errors import Internal, SourceUnreachable, SynvirtError
from synvirt.live.proxmox.config import VOLUME
from synvirt.live.ssh import Door, Shell, Tunnels
from synvirt.programs import ProgramFailed

# The sockets of a running VM and of its watcher in Proxmox VE (PVE::QemuServer::Helpers, qmeventd.service).
QMP_SOCKET: Final = "/var/run/qemu-server/{}.qmp"
QMEVENTD_SOCKET: Final = "/var/run/qmeventd.sock"
# A sleeping storage needs some seconds to give a volume's path.
COMMAND_TIMEOUT_S: Final = 60.0

COMMANDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "version": ("pveversion", "--verbose"),
        "path": ("pvesm", "path", "{volume}"),
        "make": ("mkdir", "-p", "-m", "0700", "{folder}"),
        "list": ("ls", "-1", "{folder}"),
        "room": ("df", "--output=avail", "-B1", "{folder}"),
        "overlay": ("qemu-img", "create", "-q", "-f", "qcow2", "{file}", "{bytes}"),
        "serve": (
            "qemu-nbd",
            "--fork",
            "--persistent",
            "--read-only",
            "--shared=16",
            "--format={format}",
            "--export-name={export}",
            "--socket={file}.sock",
            "--pid-file={file}.pid",
            "{image}",
        ),
        "end": ("pkill", "-KILL", "-F", "{file}", "-x", "qemu-nbd"),
        "remove": ("rm", "-f", "{files}"),
        "activate": ("lvchange", "-ay", "-K", "{lv}"),
        "deactivate": ("lvchange", "-aln", "{lv}"),
    }
)
GAPS: Final[Mapping[str, re.Pattern[str]]] = MappingProxyType(
    {
        "volume": VOLUME,
        "folder": re.compile(r"(/[A-Za-z0-9._-]+)+"),
        "file": re.compile(r"(/[A-Za-z0-9._-]+)+"),
        "bytes": re.compile(r"[0-9]{1,15}"),
        "format": re.compile(r"raw|qcow2|vmdk"),
        "export": re.compile(r"[A-Za-z0-9._-]{1,128}"),
        # A file, a device, or a drive of Ceph in QEMU's form.
        "image": re.compile(r"(/|rbd:)[A-Za-z0-9._/+@=:,-]{1,800}"),
        "lv": re.compile(r"[A-Za-z0-9._+-]{1,127}/[A-Za-z0-9._+-]{1,127}"),
    }
)


def argv(command: str, files: Sequence[str] = (), **gaps: str) -> list[str]:
    """`files`: one word each. Internal, where a gap's pattern does not allow the value."""
    for name, value in (*gaps.items(), *(("file", file) for file in files)):
        if not GAPS[name].fullmatch(value) or "/../" in f"{value}/":
            raise Internal(f"a node is asked to {command} with an odd {name}: {value[:100]!r}")
    return [word for part in COMMANDS[command] for word in (files if part == "{files}" else (part.format(**gaps),))]


class _Missing(Internal):
    """The scratch folder does not exist."""


class Node:
    """`folder` is this session's own, for sockets here; `scratch` the folder on the node."""

    def __init__(self, name: str, door: Door, folder: Path, scratch: str) -> None:
        self.name, self.scratch = name, scratch
        self._door, self._folder = door, folder
        self._shell: Shell | None = None
        self._sockets: dict[str, Path] = {}
        self._tunnels = Tunnels(lambda: door, self._local)
        self._numbers = itertools.count()
        self._closed = False

    @property
    def where(self) -> str:
        return f"node {self.name} ({self._door.host})"

    def run(
        self,
        command: str,
        *,
        files: Sequence[str] = (),
        failing: type[SynvirtError] = Internal,
        hint: str | None = None,
        **gaps: str,
    ) -> str:
        """The command's output. `failing`, where the command fails; SourceUnreachable, AuthFailed, where SSH does."""
        wanted = argv(command, files, **gaps)
        try:
            return self._login().run(wanted, COMMAND_TIMEOUT_S)
        except ProgramFailed as error:
            message = error.stderr.splitlines()[-1] if error.stderr else f"it ended with {error.returncode}"
            raise failing(f"{self.where}: {' '.join(wanted)}: {message}", hint=hint) from error

    def socket(self, remote: str) -> Path:
        """A socket here that leads to one there, for short talk. Nothing need listen there yet."""
        shell = self._login()
        if remote not in self._sockets:
            local = self._local()
            shell.forward(remote, local)
            self._sockets[remote] = local
        return self._sockets[remote]

    def tunnel(self, remote: str) -> Path:
        """The same for a disk: with an ssh of its own, so that nothing waits behind its bytes."""
        self._refuse_closed()
        return self._tunnels.to(remote)

    def tunnel_cause(self, remote: str) -> str:
        """Why nothing may come through that tunnel: what ssh reports, or nothing."""
        return self._tunnels.cause(remote)

    def _local(self) -> Path:
        return self._folder / f"{next(self._numbers)}.sock"

    def _refuse_closed(self) -> None:
        """The thread of a call that was cancelled goes on: an ssh that it starts would never be ended."""
        if self._closed:
            raise SourceUnreachable(f"the session with {self.where} is closed")

    def _login(self) -> Shell:
        self._refuse_closed()
        if self._shell is None or not self._shell.alive:
            if self._shell is not None:
                self._shell.close()
            self._sockets.clear()
            self._shell = Shell(self._door, self._folder / "login")
            self._shell.open()
        return self._shell

    def close(self) -> None:
        """Ends the tunnels and the shell. None is opened any more."""
        self._closed = True
        self._tunnels.close_all()
        if self._shell is not None:
            self._shell.close()
        self._sockets.clear()
        self._shell = None

    # ── the scratch folder ───────────────────────────────────────────────────────────────────────────────────────────

    def make_scratch(self) -> int:
        """Makes the folder, and gives its free bytes."""
        try:
            fields = self.run("room", folder=self.scratch, failing=_Missing).split()
        except _Missing:
            self.run("make", folder=self.scratch)
            fields = self.run("room", folder=self.scratch).split()
        if not fields or not fields[-1].isdecimal():
            raise Internal(f"{self.where} does not say how much room {self.scratch} has")
        return int(fields[-1])

    def files(self, prefix: str) -> list[str]:
        """The names of files in it with that prefix."""
        try:
            listed = self.run("list", folder=self.scratch).splitlines()
        except SourceUnreachable:
            raise
        except Internal:
            return []  # the folder was never made
        return [name for name in listed if name.startswith(prefix)]

    def file(self, name: str) -> str:
        return f"{self.scratch}/{name}"

    def clear(self, prefix: str) -> None:
        """Ends the processes that serve disks under a name with that prefix, and removes their files. Idempotent."""
        found = self.files(prefix)
        for name in found:
            if name.endswith(".pid"):
                self.end(name)
        if found:
            self.run("remove", files=[self.file(name) for name in found])

    def end(self, pid_file: str) -> None:
        """Ends the process of a pid file on the node; an ended one is no error. SourceUnreachable."""
        try:
            self.run("end", file=self.file(pid_file))
        except SourceUnreachable:
            raise
        except Internal:
            return  # it has already ended
