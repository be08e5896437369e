"""python -m bench.platforms.hyperv [--vms N] [--mib N]: a host's VMs listed, and a VHDX read over SMB against Samba's own
smbclient.

The list: a session, one script, the session's end, against the tests' stand-in of a host (its own time counts too). SMB: a real
Samba that signs, and one that encrypts; a VHDX of QEMU's, all data, read by the product's reader into memory, against smbclient
that gets the file into memory; log-in and start-up count on both sides. The measure is 0.8 of smbclient's speed.
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

from bench.platforms.listed import REACH_S, took
from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, RawSpec
from synvirt.jobs.copying_disks import WAITING_THREADS
from synvirt.live.hyperv.adapter import WmiApi
from synvirt.live.hyperv.places import Place, Shares
from synvirt.remote import smb_shares
from tests.fakes.hyperv.host import hyperv_host
from tests.fakes.hyperv.model import FakeVm
from tests.servers.remote_servers import PASSWORD, Samba, samba

SMB_REACH = 0.8
STEP_BYTES = 4 << 20


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.platforms.hyperv", description=__doc__)
    parser.add_argument("--vms", type=int, default=2000, help="how many VMs the host has")
    parser.add_argument("--mib", type=int, default=512, help="how large the disk is")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count; one goes before them")
    options = parser.parse_args()
    print("| row | ours | peer's | each | reach | ok |\n|---|---:|---:|---|---:|---|")
    with tempfile.TemporaryDirectory(prefix="synvirt-bench-", dir="/dev/shm") as folder:
        list_vms(Path(folder) / "host", options.vms, options.rounds)
        for name, more in (("signed", ""), ("encrypted", " server smb encrypt = required\n")):
            with samba(Path(folder) / name, more=more) as server:
                read_by_smb(server, Path(folder), options.mib, options.rounds)


def list_vms(folder: Path, vms: int, rounds: int) -> None:
    with hyperv_host(folder) as host:
        for number in range(vms):
            vm = FakeVm(str(uuid4()), f"vm {number}")
            host.hyperv.vms[vm.id] = vm
        seconds = took(lambda: WmiApi(host.access()), vms, rounds)
        asked = host.called("list")
    assert asked == rounds + 1, "all VMs are one question"
    middle, each = statistics.median(seconds), " ".join(f"{one:.2f}" for one in seconds)
    ok = _verdict(kept=middle < REACH_S)
    print(f"| {vms} VMs by one script | {middle:.2f} s | | {each} | < {REACH_S} s | {ok} |")


def read_by_smb(server: Samba, folder: Path, mib: int, rounds: int) -> None:
    raw = folder / "disk.raw"
    with raw.open("wb") as made:
        for _ in range(mib):
            made.write(os.urandom(1 << 20))
    argv = ["qemu-img", "convert", "-f", "raw", "-O", "vhdx", str(raw), str(server.folder / "disk.vhdx")]
    subprocess.run(argv, check=True)
    shares = Shares("127.0.0.1", server.port, "root", PASSWORD)
    there = shares.remote(Place(None, "disks", "disk.vhdx"))
    spec = ImageSpec(format="vhdx", over=RawSpec(path="disk.vhdx", remote=there), root=there, name="disk.vhdx")
    login = folder / "login"
    login.touch(0o600)
    login.write_text(f"username = root\npassword = {PASSWORD}\n")
    ours, theirs = list[float](), list[float]()
    for _ in range(rounds + 1):
        ours.append(_read(spec, folder / "ours"))
        theirs.append(_got(server.port, login, folder / "theirs"))
    assert (folder / "ours").read_bytes() == raw.read_bytes(), "what was read is not the disk"
    for name in ("ours", "theirs", "disk.raw", "login"):
        (folder / name).unlink()
    ratios = [peer / our for our, peer in zip(ours[1:], theirs[1:], strict=True)]
    rate, peer = (mib / statistics.median(took[1:]) for took in (ours, theirs))
    middle, each = statistics.median(ratios), " ".join(f"{one:.2f}" for one in ratios)
    row = f"{mib} MiB by {smb_shares.protection(there)}"
    ok = _verdict(kept=middle >= SMB_REACH)
    print(f"| {row} | {rate:.0f} MiB/s | {peer:.0f} MiB/s | {each} | ≥ {SMB_REACH} | {ok} |")


def _read(spec: ImageSpec, to: Path) -> float:
    to.unlink(missing_ok=True)
    began = time.monotonic()
    reader = open_reader(spec)
    try:
        with to.open("wb") as file:
            file.truncate(reader.size)

            def part(first: int) -> None:
                buffer = memoryview(bytearray(STEP_BYTES))
                for at in range(first * STEP_BYTES, reader.size, WAITING_THREADS * STEP_BYTES):
                    piece = buffer[: reader.size - at]
                    reader.read_into(at, piece)
                    os.pwrite(file.fileno(), piece, at)

            # As the copy does: this many threads, each with one buffer.
            with ThreadPoolExecutor(WAITING_THREADS) as pool:
                list(pool.map(part, range(WAITING_THREADS)))
    finally:
        reader.close()
    return time.monotonic() - began


def _got(port: int, login: Path, to: Path) -> float:
    """`smbclient` (Debian's package of that name) as it comes, except that this host's settings are not asked."""
    to.unlink(missing_ok=True)
    argv = ["smbclient", "//127.0.0.1/disks", "-p", str(port), "-A", str(login), "-s", "/dev/null", "-c", f"get disk.vhdx {to}"]
    began = time.monotonic()
    subprocess.run(argv, check=True, capture_output=True, timeout=600)
    return time.monotonic() - began


def _verdict(*, kept: bool) -> str:
    return "yes" if kept else "no"


if __name__ == "__main__":
    main()
