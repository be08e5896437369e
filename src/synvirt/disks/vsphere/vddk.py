"""A disk in a snapshot of a vSphere VM, by VMware's own transport: nbdkit's vddk plugin, if the operator has installed it.

VDDK («Virtual Disk Development Kit Programming Guide») is closed, and only VMware distributes it; nbdkit-vddk-plugin(1) uses it
and serves NBD, so our side is an ordinary NBD export. This nbdkit serves only this reader, and ends with it.

    nbdkit starts, loads the library ─▶ it serves ─▶ for each connection: VDDK logs in, opens the disk ─▶ reads

So with a wrong password nbdkit starts, and then closes the connection; and a read that VDDK refuses is only «Input/output
error» in NBD. VDDK's own message is in nbdkit's log, and is reported.
"""

import contextlib
import hashlib
import os
import re
import ssl
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from synvirt import outgoing
from synvirt.blocks import Extent
from synvirt.disks.nbd.reader import NbdReader
from synvirt.disks.nbd.served import Place, place_for, reader_of
from synvirt.disks.specs import VddkSpec
from synvirt.errors import AuthFailed, DiskReadFailed, SourceUnreachable, SynvirtError, UnsupportedFormat, cause_of
from synvirt.programs import start
from synvirt.transport import tls

# The library is large, and may be on a network's disk.
START_TIMEOUT_S: Final = 120.0
# VDDK logs in and opens the disk: seconds on a quiet vCenter.
CONNECT_TIMEOUT_S: Final = 120.0
CONNECTIONS: Final = 4
# VDDK logs out. If it were killed, its session would stay in vCenter for half an hour, and vCenter has room for only so many.
LEAVE_S: Final = 10.0
# How much of the end of nbdkit's output is read: enough for some lines of VDDK.
LOG_BYTES: Final = 16 << 10
ERROR_LINES: Final = 3

_ERROR: Final = re.compile(r"^nbdkit: .*?error: (.+)$", re.MULTILINE)


class _Meaning(NamedTuple):
    """The meaning of a message of VDDK, in lower case; SourceUnreachable, if it may pass by itself."""

    words: tuple[str, ...]
    error: type[SynvirtError]
    hint: str


# The first match counts. VIX's words for its numbers are from VMware's reference of VixDiskLib; the rest are VDDK's log lines.
_MEANINGS: Final = (
    _Meaning(
        ("ssl certificate", "thumbprint"),
        SourceUnreachable,
        "was the platform's certificate changed a moment ago? Else something between VDDK and the platform shows another one",
    ),
    _Meaning(
        ("insufficient permissions", "incorrect user name or password", "login fail"),
        AuthFailed,
        "was the password changed? Change it at the source too: synvirt sources change. Our user may also lack a privilege",
    ),
    _Meaning(
        ("transport mode",),
        DiskReadFailed,
        "this host can use none of options.vddk_transports for this disk: leave it empty, or name nbdssl too",
    ),
    _Meaning(
        ("failed to allocate", "insufficient_resource"),
        SourceUnreachable,
        "the ESXi host has no memory left for such connections (NFC): let fewer disks be copied at once",
    ),
    _Meaning(
        ("already in use", "failed to lock", "locked"),
        SourceUnreachable,
        "another program holds the disk, a backup say: it is asked again",
    ),
    _Meaning(
        ("cannot connect", "connection", "network", "could not be contacted", "address lookup", "timed out"),
        SourceUnreachable,
        "VDDK reads from the VM's ESXi host: is its name known here, and its port 902 open? test the source with --deep",
    ),
    _Meaning(
        ("cannot open shared object",),
        UnsupportedFormat,
        "options.vddk_libdir is the folder that holds lib64/libvixDiskLib.so.*: VMware's archive, unpacked",
    ),
)
_ELSE: Final = _Meaning((), DiskReadFailed, "options.transport datastore reads without VDDK")


class VddkReader:
    """Its extents are the ranges that the host reports as allocated."""

    def __init__(self, spec: VddkSpec) -> None:
        self._file = spec.file
        self._closing = contextlib.ExitStack()
        try:
            self._place = place_for("vddk", self._closing)
            self._nbd = self._served(spec)
        except BaseException:
            self.close()
            raise

    def _served(self, spec: VddkSpec) -> NbdReader:
        place = self._place
        _check_libdir(Path(spec.libdir))
        # Not on the command line, which every user of the host can read, and not in a file, which a crash would leave behind.
        secret = os.memfd_create("secret")
        try:
            os.write(secret, spec.password.encode())
            os.lseek(secret, 0, os.SEEK_SET)
            command = _command(spec, secret, place.socket, place.ready)
            child = start(command, stderr=place.log, descriptors=[secret], missing=UnsupportedFormat)
        finally:
            os.close(secret)
        try:
            return reader_of(
                child,
                place,
                self._closing,
                program="nbdkit",
                name=spec.file,
                connections=CONNECTIONS,
                timeout_s=START_TIMEOUT_S,
                ended=lambda message: _meant(f"VDDK cannot open {spec.file}", _logged(place) or message),
                late=SourceUnreachable(f"VDDK does not start within {START_TIMEOUT_S:.0f} s"),
                connect_timeout_s=CONNECT_TIMEOUT_S,
                leave_s=LEAVE_S,
            )
        except SourceUnreachable as error:
            raise self._explained("cannot open", error) from error

    @property
    def size(self) -> int:
        return self._nbd.size

    @property
    def max_readers(self) -> int:
        return self._nbd.max_readers

    def extents(self) -> Iterator[Extent]:
        try:
            yield from self._nbd.extents()
        except (DiskReadFailed, SourceUnreachable) as error:
            raise self._explained("does not say what is allocated of", error) from error

    def read_into(self, offset: int, buffer: memoryview) -> None:
        try:
            self._nbd.read_into(offset, buffer)
        except (DiskReadFailed, SourceUnreachable) as error:
            raise self._explained(f"cannot read at offset {offset} of", error) from error

    def close(self) -> None:
        self._closing.close()

    def _explained(self, what: str, error: SynvirtError) -> SynvirtError:
        """The error by VDDK's last message; without one, `error` unchanged."""
        messages = _logged(self._place)
        return _meant(f"VDDK {what} {self._file}", messages) if messages else error


def _logged(place: Place) -> str:
    """VDDK's last errors in nbdkit's log; empty, where there are none."""
    with place.log.open("rb") as log:
        log.seek(-min(LOG_BYTES, log.seek(0, os.SEEK_END)), os.SEEK_END)
        lines = _ERROR.findall(log.read(LOG_BYTES).decode(errors="replace"))
    return "; ".join(dict.fromkeys(line.strip() for line in lines[-ERROR_LINES:]))


def _meant(what: str, messages: str) -> SynvirtError:
    lowered = messages.lower()
    meaning = next((one for one in _MEANINGS if any(word in lowered for word in one.words)), _ELSE)
    return meaning.error(f"{what}: {messages}", hint=meaning.hint)


def _check_libdir(libdir: Path) -> None:
    """The library is loaded as code: only root and the service's own user may have put it there, or may change it."""
    inside = libdir.resolve() / "lib64"
    files = [path for path in inside.iterdir() if path.name.startswith("libvixDiskLib")] if inside.is_dir() else []
    for path in (*files, inside, *inside.parents):
        try:
            status = path.stat()
        except OSError:
            continue  # nbdkit reports what is missing
        sticky = status.st_mode & stat.S_ISVTX and path not in (*files, inside, inside.parent)
        if status.st_uid not in (0, os.geteuid()) or (status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky):
            raise UnsupportedFormat(
                f"{path} can be changed by others than root and this service: VDDK is not loaded from there",
                hint=f"chown -R root:root {libdir} && chmod -R go-w {libdir}, and name a folder under such folders alone",
            )


def _command(spec: VddkSpec, secret: int, socket: Path, ready: Path) -> list[str]:
    thumbprint = _thumbprint(spec)
    try:
        # The thumbprint identifies the host; for its name VDDK would ask a name server again.
        address = outgoing.sources().address(spec.host, spec.port)
    except OSError as error:
        raise SourceUnreachable(f"{spec.host} does not answer on port {spec.port}: {cause_of(error)}") from error
    return [
        "nbdkit", "--foreground", "--readonly", "--exit-with-parent", "--unix", str(socket), "--pidfile", str(ready),
        # It ends with our last connection. Only then VDDK logs out; it does not when a signal ends it.
        "--filter=exitlast",
        "vddk",
        f"libdir={spec.libdir}",
        f"server={address}",
        f"port={spec.port}",
        f"user={spec.user}",
        f"password=-{secret}",
        f"thumbprint={thumbprint}",
        f"vm=moref={spec.vm_id}",
        f"snapshot={spec.snapshot_id}",
        f"file={spec.file}",
        *([f"transports={spec.transports}"] if spec.transports else []),
    ]  # fmt: skip


def _thumbprint(spec: VddkSpec) -> str:
    """VDDK identifies certificates by SHA-1: that of the certificate which our own check has just accepted."""
    context = tls.context(spec.host, verify=spec.verify_tls, fingerprint_sha256=spec.fingerprint_sha256)
    try:
        der = tls.shown_certificate(spec.host, spec.port, context)
    except ssl.SSLCertVerificationError as error:
        raise tls.not_trusted(spec.host, error.verify_message) from error
    except OSError as error:
        raise SourceUnreachable(f"{spec.host} does not answer on port {spec.port}: {cause_of(error)}") from error
    return hashlib.sha1(der).digest().hex(":").upper()  # noqa: S324 - VDDK's choice, after a check by SHA-256
