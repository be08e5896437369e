"""Mutated inputs, read within the cage: `python -m bench.hostile [--count 10000] [--seed 1] [READER …]`.

Of each reader a child enters the cage that a worker has, and reads this many damaged copies of one good image: bytes changed,
runs of them overwritten by numbers that mean something, parts cut out, doubled, or cut off. What it raises has to be our error;
no input may take more than 2 s of processor time, or 512 MiB of memory, which the cage itself bounds.
"""

import argparse
import json
import os
import random
import resource
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

from synvirt.guests.inside.seekable import Seekable

SECONDS_MAX, MEMORY_MAX = 2.0, 512 << 20
# A disk of exbibytes may have as many as it likes: a copy asks for them one after the other.
EXTENTS_MAX = 20_000
OVF = """<?xml version="1.0"?><Envelope xmlns="http://schemas.dmtf.org/ovf/envelope/1" xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1"
 xmlns:rasd="http://schemas.dmtf.org/wbem/wscim/1/cim-schema/2/CIM_ResourceAllocationSettingData">
<References><File ovf:href="disk.vmdk" ovf:id="file1"/></References>
<DiskSection><Info/><Disk ovf:capacity="2" ovf:capacityAllocationUnits="byte * 2^20" ovf:diskId="disk1" ovf:fileRef="file1"
 ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized"/></DiskSection>
<VirtualSystem ovf:id="web"><Info/><Name>web</Name><VirtualHardwareSection><Info/>
<Item><rasd:InstanceID>1</rasd:InstanceID><rasd:ResourceType>3</rasd:ResourceType><rasd:VirtualQuantity>2</rasd:VirtualQuantity></Item>
<Item><rasd:InstanceID>2</rasd:InstanceID><rasd:ResourceType>4</rasd:ResourceType>
<rasd:AllocationUnits>byte * 2^20</rasd:AllocationUnits>
<rasd:VirtualQuantity>512</rasd:VirtualQuantity></Item>
<Item><rasd:InstanceID>3</rasd:InstanceID><rasd:ResourceType>6</rasd:ResourceType></Item>
<Item><rasd:InstanceID>4</rasd:InstanceID><rasd:Parent>3</rasd:Parent><rasd:ResourceType>17</rasd:ResourceType>
<rasd:HostResource>ovf:/disk/disk1</rasd:HostResource></Item>
</VirtualHardwareSection></VirtualSystem></Envelope>"""
# What qemu-img makes, by the name of its file.
IMAGES = {
    "a.qcow2": ("qcow2", ""),
    "a-v2.qcow2": ("qcow2", "compat=0.10,cluster_size=4096"),
    "sparse.vmdk": ("vmdk", "subformat=monolithicSparse"),
    "stream.vmdk": ("vmdk", "subformat=streamOptimized"),
    "a.vhdx": ("vhdx", "block_size=1M"),
    "a.vhd": ("vpc", "subformat=dynamic"),
    "a.vdi": ("vdi", ""),
}
# Descriptions of machines and their archives; s3.xml is what a server answers that is asked for the names in a bucket.
DESCRIPTIONS = ("a.ova", "a.ovf", "a.vmx", "a.vbox", "a.xva", "a.vmcx", "a-2012.xml")
# What a restore point says: the two lines of its manifest, once it is decrypted, and its domain.
POINTS = ("point-shown.json", "point-sealed.json", "point-domain.xml")
# What the disks of a guest hold, as rehearsals read it: of Btrfs the pages that are used, of LVM a label and its metadata.
INSIDE = ("a.btrfs", "a.lvm")
READERS = (*IMAGES, *DESCRIPTIONS, *POINTS, *INSIDE, "s3.xml")
S3_LIST = """<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>bucket</Name>
<IsTruncated>false</IsTruncated><Contents><Key>web/web.ova</Key><Size>7</Size></Contents>
<Contents><Key>web/web.mf</Key><Size>9</Size></Contents><CommonPrefixes><Prefix>web/disks/</Prefix></CommonPrefixes>
</ListBucketResult>"""
SHOWN = (
    b'{"format":1,"id":"00000000-0000-0000-0000-000000000001","created_at":"2026-01-01T00:00:00Z",'
    b'"disks":[{"size_bytes":5,"pages":["' + b"0" * 64 + b'"]}]}'
)
# Numbers that tables and headers trip over.
_NUMBERS = (0, 1, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 31, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)


def seed_of(reader: str, folder: Path) -> bytes:
    """A good one, of 2 MiB with a few blocks of data."""
    raw, made = folder / "raw", folder / reader
    content = bytearray(2 << 20)
    for at in (0, 700_000, 1_500_000):
        content[at : at + 9000] = random.Random(at).randbytes(4500) + bytes(4500)
    raw.write_bytes(content)
    if reader in IMAGES:
        form, options = IMAGES[reader]
        argv = [
            "qemu-img",
            "convert",
            "-q",
            "-f",
            "raw",
            "-O",
            form,
            *(["-o", options] if options else []),
            str(raw),
            str(made),
        ]
        subprocess.run(argv, check=True, timeout=60)
        return made.read_bytes()
    if reader == "s3.xml":
        return S3_LIST.encode()
    if reader in POINTS:
        return restore_point(reader)
    if reader in INSIDE:
        return inside(reader, folder)
    if reader not in ("a.ova", "a.ovf"):
        return machine(reader, bytes(content), folder)
    (folder / "disk.vmdk").write_bytes(seed_of("stream.vmdk", folder))
    if reader == "a.ovf":
        return OVF.encode()
    (folder / "web.ovf").write_text(OVF)
    with tarfile.open(made, "w", format=tarfile.PAX_FORMAT) as archive:
        for name in ("web.ovf", "disk.vmdk"):
            archive.add(folder / name, name)
    return made.read_bytes()


def machine(reader: str, raw: bytes, folder: Path) -> bytes:
    """The description, or the archive, that is damaged; what it names lies in the folder."""
    from tests.disks.xva import xva_archives
    from tests.offline import vbox_machines
    from tests.offline.hyperv import hyperv_exports
    from tests.offline.xva import ova_xml_text

    if reader == "a.vmx":
        (folder / "disk.vmdk").write_bytes(seed_of("sparse.vmdk", folder))
        entries = {"config.version": "8", "displayName": "web", "guestOS": "debian12-64", "memSize": "512", "numvcpus": "2"}
        entries |= {"scsi0.present": "TRUE", "scsi0:0.present": "TRUE", "scsi0:0.fileName": "disk.vmdk", "firmware": "efi"}
        entries |= {"ethernet0.present": "TRUE", "ethernet0.address": "00:50:56:01:02:03", "ethernet0.addressType": "static"}
        return "".join(f'{key} = "{value}"\n' for key, value in entries.items()).encode()
    if reader == "a.vbox":
        vbox_machines.machine(folder)
        return vbox_machines.MACHINE
    if reader == "a.xva":
        text = ova_xml_text.one_disk(len(raw), memory_bytes=512 << 20)
        return xva_archives.archive(folder / "made.xva", text, {"Ref:4": raw}).read_bytes()
    (folder / "disk.vhdx").write_bytes(seed_of("a.vhdx", folder))
    hyperv_exports.export(folder / "web", {"ide0:0": folder / "disk.vhdx"}, old=reader == "a-2012.xml")
    return placed(reader, folder)[0].read_bytes()


def placed(reader: str, folder: Path) -> tuple[Path, Path]:
    """Where the damaged file lies, and what is looked into: of Hyper-V the folder that it is in."""
    if reader in ("a.vmcx", "a-2012.xml"):
        [path] = (folder / "web" / "Virtual Machines").glob("*.vmcx" if reader == "a.vmcx" else "*.xml")
        return path, folder / "web"
    path = folder / f"read-{reader}"
    return path, path


def mutated(seed: bytes, chance: random.Random) -> bytes:
    """Half of the damage is in the first 4 KiB, where headers and tables are."""
    content = bytearray(seed)
    for _ in range(chance.choice((1, 1, 2, 3, 8))):
        at = chance.randrange(min(len(content), 4096) if chance.random() < 0.5 else len(content))
        match chance.randrange(6):
            case 0:
                content[at] ^= 1 << chance.randrange(8)
            case 1:
                content[at : at + 4] = struct.pack(chance.choice(("<I", ">I")), chance.choice(_NUMBERS) & 0xFFFF_FFFF)
            case 2:
                content[at : at + 8] = struct.pack(chance.choice(("<Q", ">Q")), chance.choice(_NUMBERS))
            case 3:
                length = chance.randrange(1, 600)
                content[at : at + length] = content[chance.randrange(len(content)) :][:length]
            case 4:
                del content[at : at + chance.randrange(1, 600)]
            case _:
                del content[max(at, 1) :]
        content = content or bytearray(b"\0")
    return bytes(content)


def child(reader: str, count: int, seed: int, folder: Path) -> dict[str, object]:
    """In the cage from its first input on."""
    from synvirt.cage import Cage, enter
    from synvirt.disks import detect, open_reader
    from synvirt.errors import Internal, SynvirtError
    from synvirt.offline.registry import BY_KIND  # noqa: F401 - all importers are loaded before the cage

    good, (path, whole) = (folder / f"seed-{reader}").read_bytes(), placed(reader, folder)
    pages = json.loads((folder / "pages").read_text()) if reader == "a.btrfs" else []
    buffer = memoryview(bytearray(1 << 16))

    def read() -> None:
        if reader in DESCRIPTIONS:
            look(whole, folder)
            return
        if reader == "s3.xml":
            listed(path.read_bytes())
            return
        if reader in POINTS:
            look_at_point(reader, path.read_bytes())
            return
        if reader in INSIDE:
            look_inside(reader, path.read_bytes(), pages)
            return
        disk = open_reader(detect(path))
        try:
            for extent in islice(disk.extents(), EXTENTS_MAX):
                if not extent.zero:
                    disk.read_into(extent.start, buffer[: min(extent.length, len(buffer))])
        finally:
            disk.close()

    path.write_bytes(good)
    path.chmod(0o666)
    folder.chmod(0o777)
    read()
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    layers = enter(Cage(reads=(str(folder),), writes=(str(folder),), memory_bytes=size + MEMORY_MAX))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    chance, slowest, refused, foreign = random.Random(f"{seed} {reader}"), 0.0, 0, []
    for number in range(count):
        path.write_bytes(mutated(good, chance))
        begun = time.process_time()
        try:
            read()
        except Internal as error:
            foreign.append(f"{number}: {error.detail}")
        except SynvirtError:
            refused += 1
        except Exception as error:
            foreign.append(f"{number}: {type(error).__name__}: {error}"[:300])
        slowest = max(slowest, time.process_time() - begun)
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10
    return {"refused": refused, "foreign": foreign[:10], "slowest_s": slowest, "more_mib": peak, "layers": layers}


def listed(answer: bytes) -> None:
    """The names in a bucket, by a server's answer without a connection."""
    from synvirt.remote import Remote
    from synvirt.remote.s3 import S3Place

    class Answering(S3Place):
        def ask(self, *_: Any, **__: Any) -> Any:
            return SimpleNamespace(status=200, text=lambda most: answer[: most + 1])

    Answering(Remote(url="s3://bucket/", endpoint="https://s3.example/")).names("web")


def restore_point(reader: str) -> bytes:
    """That part of a good one."""
    from tests.backups.restores.test_restoring_domain import XML
    from tests.jobs.test_points import made

    if reader == "point-domain.xml":
        return XML.encode()
    good = made(UUID(int=1), XML)
    return good.shown if reader == "point-shown.json" else good.inside or b""


def look_at_point(reader: str, content: bytes) -> None:
    """As the confined child of the service does; of the domain also what the service makes of it."""
    from synvirt.backups.restores.domain import foreign
    from synvirt.repository.manifest import HERE, Unread, sound

    if reader == "point-domain.xml":
        foreign(content.decode(errors="replace"))
        return
    read = HERE.shown if reader == "point-shown.json" else HERE.manifests
    line = content if reader == "point-shown.json" else SHOWN
    sound(read([Unread(str(UUID(int=1)), line, content)])[0])


PAGE = 4096


class Paged(Seekable):
    """`content`: pages of a volume, one after the other. `pages`: their numbers; the others hold zeros."""

    def __init__(self, content: bytes, pages: Sequence[int]) -> None:
        super().__init__((max(pages) + 1) * PAGE)
        self._content, self._places = content, {number: place for place, number in enumerate(pages)}

    def _bytes(self, offset: int, length: int) -> bytes:
        first, last = offset // PAGE, (offset + length - 1) // PAGE
        whole = b"".join(self._page(number) for number in range(first, last + 1))
        return whole[offset - first * PAGE :][:length]

    def _page(self, number: int) -> bytes:
        place = self._places.get(number)
        return bytes(PAGE) if place is None else self._content[place * PAGE : (place + 1) * PAGE].ljust(PAGE, b"\0")


def inside(reader: str, folder: Path) -> bytes:
    """Of Btrfs the superblock's page comes first, and `pages` in the folder says which they are."""
    from tests.guests import btrfs_images, linux_trees, lvm_disks

    if reader == "a.lvm":
        root = lvm_disks.segment(1, 0, 2, "striped", 'stripe_count = 1\nstripes = ["pv0", 0]')
        text = lvm_disks.group("vg", {"pv0": "A" * 32}, {"root": root, "home": root.replace("0]", "2]")})
        return lvm_disks.physical("A" * 32, text, lvm_disks.DATA)[: lvm_disks.AREA + 512 + len(text)]
    image = btrfs_images.made(folder / "image", linux_trees.planted(folder / "tree"), "-n", str(PAGE))
    with image.open("rb") as file:
        pages = enumerate(iter(lambda: file.read(PAGE), b""))
        found = {number: page for number, page in pages if page.strip(b"\0")}
    numbers = sorted(found, key=lambda number: number != 0x10000 // PAGE)
    (folder / "pages").write_text(json.dumps(numbers))
    return b"".join(found[number] for number in numbers)


def look_inside(reader: str, content: bytes, pages: list[int]) -> None:
    """As `guests/inside/looker.py` does. Checksums of Btrfs are not looked at, so that what lies behind them is reached."""
    from synvirt.guests.inside import linux_facts, lvm, superblocks
    from synvirt.guests.inside.btrfs import trees
    from synvirt.guests.inside.btrfs.subvolumes import Btrfs
    from synvirt.guests.inside.files import UnixFiles

    volume = Paged(content, pages or list(range(len(content) // PAGE + 1)))
    if reader == "a.lvm":
        held = lvm.physical(volume)
        for _, found in lvm.logical_volumes([] if held is None else [held], {}):
            found.read(PAGE)
        return
    trees.CHECKSUMS = {}
    superblocks.btrfs(volume)
    for place in Btrfs([volume]).subvolumes():
        linux_facts.facts_of(UnixFiles(place))


def look(path: Path, root: Path) -> None:
    from synvirt.offline import registry

    registry.detect(path, root).inspect(path, root)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--child", type=Path)
    parser.add_argument("readers", nargs="*", default=READERS)
    asked = parser.parse_args()
    if asked.child is not None:
        print(json.dumps(child(asked.readers[0], asked.count, asked.seed, asked.child)))
        return
    good = [measured(reader, asked.count, asked.seed) for reader in asked.readers]
    sys.exit(0 if all(good) else 1)


def measured(reader: str, count: int, seed: int) -> bool:
    """True: nothing foreign, nothing slow, nothing large."""
    with tempfile.TemporaryDirectory(prefix="synvirt-hostile-") as name:
        folder = Path(name)
        (folder / f"seed-{reader}").write_bytes(seed_of(reader, folder))
        argv = [sys.executable, "-m", "bench.hostile", "--child", name, "--count", str(count), "--seed", str(seed), reader]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONWARNINGS": "error"})
    if done.returncode != 0:
        print(f"{reader:14} its process ended with {done.returncode}: {done.stderr.strip()[-300:]}")
        return False
    found = json.loads(done.stdout)
    good = not found["foreign"] and found["slowest_s"] <= SECONDS_MAX and found["more_mib"] <= MEMORY_MAX >> 20
    print(
        f"{reader:14} {count:6} inputs, {found['refused']:6} refused, slowest {found['slowest_s']:.2f} s, "
        f"{found['more_mib']} MiB more, {len(found['foreign'])} foreign: {'ok' if good else 'NOT OK'}",
        flush=True,
    )
    for one in found["foreign"]:
        print(f"    {one}")
    return good


if __name__ == "__main__":
    main()
