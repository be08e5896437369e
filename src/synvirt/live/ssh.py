"""Unix sockets of another host, by SSH: each has a socket here (OpenSSH's `-L LOCAL:REMOTE`). Blocking code.

    libvirt's own socket, a backup's NBD socket ◀── sshd ◀── ssh -N ◀── a socket in a folder that only we may enter

For forwarding, a key that may do only that (`restrict,port-forwarding` in authorized_keys) is enough; a Shell runs commands.
The host's key is pinned. No secret is in an argument. Each ssh ends with our process, however that ends.
"""

import base64
import binascii
import contextlib
import hashlib
import os
import re
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from synvirt import outgoing
from synvirt.errors import AuthFailed, BadRequest, SourceUnreachable, SynvirtError, cause_of
from synvirt.programs import ProgramFailed, end_group, run, start

CONNECT_TIMEOUT_S = 20
# After this long without an answer (three questions) the other host counts as gone.
ALIVE_EVERY_S, ALIVE_MISSED_MAX = 5, 3
_MESSAGE_CHARS = 400
SSH_FAILED = 255
_SSH_PORT = 22
# A flag of the kernel's in /proc/net/unix (linux/net.h, __SO_ACCEPTCON): listen(2) has been called.
_ACCEPTS = 0x10000
# Preferred to OpenSSH's own first choice (ChaCha20), which takes twice as long for each byte on a processor with AES
# instructions. The other ciphers stay in the list, for hosts that have only those.
FAST_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
_CPUINFO = Path("/proc/cpuinfo")

# What ssh writes, the error that it means, and a hint. The first match counts.
_CAUSES: tuple[tuple[re.Pattern[str], type[SynvirtError], str], ...] = (
    (
        re.compile(r"host key|HOST IDENTIFICATION|authenticity of host", re.IGNORECASE),
        SourceUnreachable,
        "compare `ssh-keyscan HOST` with the host's own /etc/ssh/ssh_host_*_key.pub, then set options.known_hosts to it",
    ),
    (
        re.compile(r"Permission denied|Too many authentication failures|no mutual signature|incorrect passphrase"),
        AuthFailed,
        "is the user right, and is the key in its authorized_keys?",
    ),
    (re.compile(r"Load key|invalid format|error in libcrypto"), AuthFailed, "credentials.private_key is not a private key"),
)


@dataclass(frozen=True, slots=True)
class Door:
    """How to log in. `folder`: for files that only our user may read; `known_hosts` None: those of the service's user."""

    host: str
    port: int
    user: str | None
    folder: Path
    private_key: str | None = None
    secret: str | None = None
    known_hosts: str | None = None
    verify: bool = True

    def argv(self) -> list[str]:
        """The ssh command up to the host, with every option fixed. No secret is in it."""
        options = {
            "BatchMode": "no" if self.secret is not None else "yes",
            "StrictHostKeyChecking": "yes" if self.verify else "no",
            "NumberOfPasswordPrompts": "1",
            "ConnectTimeout": str(CONNECT_TIMEOUT_S),
            "ServerAliveInterval": str(ALIVE_EVERY_S),
            "ServerAliveCountMax": str(ALIVE_MISSED_MAX),
            "ExitOnForwardFailure": "yes",
            "StreamLocalBindUnlink": "yes",
            "ControlMaster": "no",
            "ControlPath": "none",
            "ForwardAgent": "no",
            "PermitLocalCommand": "no",
            "LogLevel": "ERROR",
        }
        if _has_aes():
            options["Ciphers"] = FAST_CIPHERS
        if not self.verify:
            options["UserKnownHostsFile"] = "/dev/null"
        elif self.known_hosts is not None:
            # ssh splits this value at blanks; ours has none.
            options["UserKnownHostsFile"] = str(self._file("known_hosts", self.known_hosts))
            options["GlobalKnownHostsFile"] = "/dev/null"
        argv = ["ssh", "-T", "-p", str(self.port)]
        if self.user is not None:
            argv += ["-l", self.user]
        if self.private_key is not None:
            options["IdentitiesOnly"] = "yes"
            argv += ["-i", str(self._file("key", self.private_key.rstrip("\n") + "\n"))]
        for name, value in options.items():
            argv += ["-o", f"{name}={value}"]
        return argv

    def led(self) -> list[str]:
        """Arguments that make ssh connect to the checked address, without asking a name server again. Keys are still looked up
        by the name. SourceUnreachable, BadRequest."""
        try:
            address = outgoing.sources().address(self.host, self.port, timeout_s=CONNECT_TIMEOUT_S)
        except OSError as error:
            raise refused(self, str(error)) from error
        if address == self.host:
            return []
        return ["-o", f"HostName={address}", "-o", f"HostKeyAlias={known_as(self.host, self.port)}"]

    def env(self) -> Mapping[str, str]:
        """The environment of ssh. It reads a password, or a key's passphrase, from a program that prints a file, never from an
        argument. With neither a password nor a key, it tries the keys in the agent of the service's user."""
        if self.secret is None:
            agent = os.environ.get("SSH_AUTH_SOCK")
            return {} if agent is None or self.private_key is not None else {"SSH_AUTH_SOCK": agent}
        secret = self._file("secret", self.secret)
        asked = self._file("askpass", f"#!/bin/sh\nexec cat '{secret}'\n")
        asked.chmod(0o700)
        return {"SSH_ASKPASS": str(asked), "SSH_ASKPASS_REQUIRE": "force"}

    def _file(self, name: str, content: str) -> Path:
        path = self.folder / name
        path.touch(mode=0o600)
        path.write_text(content)
        return path


@cache
def _has_aes() -> bool:
    """Whether this host's processor has AES instructions."""
    try:
        content = _CPUINFO.read_text(errors="replace")
    except OSError:
        return False
    return re.search(r"^(flags|Features)\s*:.*\baes\b", content, re.MULTILINE) is not None


class _Child:
    """An ssh that runs until `close`, or until our process ends. `local`: its socket here."""

    def __init__(self, door: Door, local: Path) -> None:
        self.local, self._door = local, door
        self._log = local.with_suffix(".log")
        self._child: subprocess.Popen[bytes] | None = None

    def _start(self, before: Sequence[str], after: Sequence[str]) -> None:
        """SourceUnreachable, AuthFailed."""
        ssh, *options = self._door.argv()
        options += self._door.led()
        argv = [ssh, *before, *options, "-N", *after, "--", self._door.host]
        child = start(argv, stderr=self._log, env=self._door.env(), missing=SourceUnreachable)
        self._child = child
        deadline = time.monotonic() + CONNECT_TIMEOUT_S + 5
        while not self._is_listening():
            if child.poll() is not None:
                raise refused(self._door, self.messages())
            if time.monotonic() > deadline:
                self.close()
                raise refused(self._door, f"no answer within {CONNECT_TIMEOUT_S} s")
            time.sleep(0.02)

    def _is_listening(self) -> bool:
        """Whether its socket takes connections."""
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    def messages(self) -> str:
        """What ssh has written to its standard error, for example that a socket is missing."""
        return self._log.read_text(errors="replace").strip()[-_MESSAGE_CHARS:] if self._log.exists() else ""

    def cause(self) -> str:
        """Why nothing may come through it, for an error; empty, where ssh runs and has reported nothing."""
        code = None if self._child is None else self._child.poll()
        said = _line(self.messages())
        ended = "" if code is None else f"ssh has ended with {code}"
        return ": ".join(filter(None, (ended, said)))

    def close(self) -> None:
        if self._child is not None:
            end_group(self._child)
            self._child.wait()
            self._child = None
        self.local.unlink(missing_ok=True)


class Tunnel(_Child):
    """A socket here that leads to one there, from `open` until `close` or the end of our process."""

    def __init__(self, door: Door, remote: str, local: Path) -> None:
        super().__init__(door, local)
        self._remote = remote

    def open(self) -> None:
        """SourceUnreachable, AuthFailed. The socket there need not exist yet."""
        self._start((), ("-L", f"{self.local}:{self._remote}"))

    def _is_listening(self) -> bool:
        """By /proc/net/unix (proc(5)): ssh makes the socket at its path first, and listens at it then."""
        wanted = os.fsencode(self.local)
        with open("/proc/net/unix", "rb") as sockets:
            rows = [row.split(None, 7) for row in sockets if wanted in row]
        return any(row[7:] == [wanted + b"\n"] and int(row[3], 16) & _ACCEPTS for row in rows)


class Tunnels:
    """The tunnels of a session, by the socket there. `door` and `local` give the login and the path here of the next."""

    def __init__(self, door: Callable[[], Door], local: Callable[[], Path]) -> None:
        self._door, self._local = door, local
        self._open: dict[str, Tunnel] = {}
        self._opening = threading.Lock()

    def to(self, remote: str) -> Path:
        """The socket here; the tunnel is opened, if there is none or it was lost. SourceUnreachable, AuthFailed."""
        with self._opening:
            tunnel = self._open.get(remote)
            if tunnel is None or not tunnel.alive:
                self.close(remote)
                tunnel = self._open[remote] = Tunnel(self._door(), remote, self._local())
                tunnel.open()
            return tunnel.local

    def cause(self, remote: str | None) -> str:
        """Why nothing may come through: what its ssh reports, or nothing."""
        return self._open[remote].cause() if remote in self._open else ""

    def close(self, remote: str) -> None:
        """Ends that tunnel, if there is one."""
        if (tunnel := self._open.pop(remote, None)) is not None:
            tunnel.close()

    def close_all(self, kept: Collection[str] = ()) -> None:
        """All but those `kept`, each of them whatever becomes of the others."""
        with contextlib.ExitStack() as closing:
            for remote in list(self._open):
                if remote not in kept:
                    closing.callback(self.close, remote)


class Shell(_Child):
    """One login for many commands and sockets (ssh_config(5), ControlMaster), as a login takes longer than they do."""

    def open(self) -> None:
        """SourceUnreachable, AuthFailed."""
        self._start(("-M", "-S", str(self.local)), ())

    def _is_listening(self) -> bool:
        """ssh makes the socket at another path, and moves it to this one when it listens."""
        return self.local.exists()

    def run(self, command: Sequence[str], timeout_s: float) -> str:
        """The output of a command there. ProgramFailed, where the command fails; SourceUnreachable, where ssh itself fails."""
        try:
            return run([*self._argv(), "--", self._door.host, shlex.join(command)], timeout_s=timeout_s).stdout
        except ProgramFailed as error:
            # ssh's own exit code (ssh(1), EXIT STATUS). Nor has the command failed where something else ended ssh.
            if error.returncode != SSH_FAILED and error.cut_off is None:
                raise
            silent = error.returncode in (SSH_FAILED, None)
            why = f"no answer within {timeout_s:.0f} s" if silent else f"ssh {error.cut_off}"
            raise refused(self._door, error.stderr or why) from error

    def forward(self, remote: str, local: Path) -> None:
        """Makes a socket here that leads to one there while the login lasts. For short talk; a disk has its own tunnel."""
        argv = [*self._argv(), "-O", "forward", "-L", f"{local}:{remote}", "--", self._door.host]
        try:
            run(argv, timeout_s=CONNECT_TIMEOUT_S)
        except ProgramFailed as error:
            raise refused(self._door, error.stderr) from error

    def _argv(self) -> list[str]:
        # If the login is gone, none is made here: the next caller opens one.
        return ["ssh", "-T", "-S", str(self.local), "-o", "ControlMaster=no", "-o", "ProxyCommand=false"]


def refused(door: Door, messages: str) -> SynvirtError:
    """What ssh wrote, as our error: SourceUnreachable, AuthFailed."""
    where = f"{door.host} by SSH on port {door.port}"
    for pattern, error, hint in _CAUSES:
        if pattern.search(messages):
            what = "refused the login" if error is AuthFailed else "does not have the expected host key"
            return error(f"{where} {what}: {_line(messages)}", hint=hint)
    return SourceUnreachable(
        f"{where} cannot be reached: {_line(messages) or 'ssh gives no reason'}",
        hint="is it running, is the port right, and does a firewall let this host through?",
    )


def _line(messages: str) -> str:
    lines = [line.strip() for line in messages.splitlines() if line.strip(" @")]
    return lines[-1] if lines else ""


def known_as(host: str, port: int) -> str:
    """The name of a host in a line of known_hosts."""
    return host if port == _SSH_PORT else f"[{host}]:{port}"


def pinned_key(host: str, port: int, fingerprint: str) -> str:
    """The host's key with the pinned SHA-256, as a line of known_hosts. SourceUnreachable, when the host has none."""
    try:
        address = outgoing.sources().address(host, port, timeout_s=CONNECT_TIMEOUT_S)
    except OSError as error:
        raise SourceUnreachable(f"{host} shows no SSH host key on port {port}: {cause_of(error)}") from error
    try:
        output = run(
            ["ssh-keyscan", "-T", "10", "-p", str(port), "--", address], timeout_s=30, missing=SourceUnreachable
        ).stdout
    except ProgramFailed as error:
        raise SourceUnreachable(f"{host} shows no SSH host key on port {port}: {error.stderr or 'no answer'}") from error
    keys = [line for line in output.splitlines() if line and not line.startswith("#")]
    for line in keys:
        if key_fingerprint(line) == fingerprint:
            return f"{known_as(host, port)} {line.partition(' ')[2]}\n"
    shown = ", ".join(key_fingerprint(line) for line in keys) or "none"
    raise SourceUnreachable(
        f"{host} has no SSH host key with the pinned SHA-256 {fingerprint}; it shows {shown}",
        hint="somebody may be in between; if the host was given new keys, pin one of those",
    )


def key_fingerprint(line: str) -> str:
    """SHA-256 of the key in a line of known_hosts, in the form of certificates' fingerprints. BadRequest."""
    fields = line.split()
    try:
        return hashlib.sha256(base64.b64decode(fields[2], validate=True)).digest().hex(":").upper()
    except (IndexError, binascii.Error) as error:
        raise BadRequest(f"no line of known_hosts: {line[:60]!r}") from error
