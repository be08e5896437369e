"""A disk on an SMB share, read in the cage of its order: Samba's client is a program of its own, and is in it, too."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from synvirt.cage import layers
from tests.servers.remote_servers import LOOPBACK, PASSWORD, samba

# Run in a child: enters the cage, reads all of the disk, and says how, and what its own children are allowed.
CHILD = """
import hashlib, json, sys
from pathlib import Path
from synvirt.cage import enter
from synvirt.disks import open_reader
from synvirt.disks.specs import FileWriterSpec, RawSpec
from synvirt.jobs.caging import cage_of
from synvirt.jobs.orders import CopyOrder, DiskOrder
from synvirt.remote import Remote

port, allowed, password, target = json.loads(sys.stdin.readline())
there = Remote(url=f"smb://127.0.0.1:{port}/disks/", credentials=(("username", "root"), ("password", password)),
               allowed_hosts=tuple(allowed))
spec = RawSpec(path="disk.vhdx", remote=there)
order = CopyOrder(disks=(DiskOrder(key="a", reader=spec, writer=FileWriterSpec(path=target, size_bytes=1 << 20)),))
held = enter(cage_of(order))
reader = open_reader(spec)
buffer = bytearray(reader.size)
reader.read_into(0, memoryview(buffer))
status = []
for task in Path("/proc/self/task").iterdir():
    for pid in (task / "children").read_text().split():
        lines = (one.partition(":") for one in Path(f"/proc/{pid}/status").read_text().splitlines())
        status.append({name: value.split() for name, _, value in lines})
native = reader._connection.place.native()
digest = hashlib.sha256(buffer).hexdigest()
print(json.dumps({"held": held, "digest": digest, "by_samba": native.read_bytes, "helpers": status}))
"""


@pytest.mark.parametrize("encrypted", [False, True])
def test_the_helpers_of_an_smb_share_are_in_the_cage_of_the_copy(tmp_path: Path, *, encrypted: bool) -> None:
    more = " server smb encrypt = required\n" if encrypted else ""
    content = random.Random(6).randbytes(6 << 20)
    with samba(tmp_path / "samba", more=more) as server:
        (server.folder / "disk.vhdx").write_bytes(content)
        target = tmp_path / "target"
        target.touch()
        order = json.dumps([server.port, LOOPBACK, PASSWORD, str(target)])
        argv = [sys.executable, "-P", "-c", CHILD]
        ran = subprocess.run(argv, input=order, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["digest"] == hashlib.sha256(content).hexdigest()
    # All but the first pieces came by Samba's client: it is not refused there.
    assert found["by_samba"] > len(content) // 2
    assert found["helpers"]
    assert {"landlock", "seccomp"} <= set(found["held"]) or not layers()["landlock"]
    for helper in found["helpers"]:
        assert (helper["Seccomp"], helper["NoNewPrivs"]) == (["2"], ["1"])
        if os.geteuid() == 0:
            assert "0" not in helper["Uid"]
            # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH at most.
            assert int(helper["CapEff"][0], 16) & ~0b110 == 0
