"""Images that QEMU opens by a passphrase, LUKS and qcow2 with LUKS in it, with a cheap key: for one that QEMU makes itself, it
measures for two seconds of a processor how many rounds the key is worth, whatever is asked for."""

import subprocess
from pathlib import Path

from tests.disks.block_images import qemu
from tests.needs import need

MIB = 1 << 20
# Of LUKS 1 with a key of 512 bits, in sectors of 512 bytes.
PAYLOAD_AT = 2 * MIB
# The header extension of qcow2 that says where the LUKS header lies (docs/interop/qcow2.txt in QEMU's source).
ENCRYPTION, ENCRYPTED_BY_LUKS = 0x0537BE77, 2
CLUSTER_BYTES = 64 << 10


def luks_image(image: Path, raw: Path, key: Path) -> Path:
    """Of the raw disk; `key` is the file with the passphrase. All lie in one folder."""
    _header(image, key)
    with image.open("r+b") as file:
        file.truncate(PAYLOAD_AT + raw.stat().st_size)
    return _filled(image, raw, key, f"driver=luks,key-secret=s,file.filename={image.name}")


def luks_in_qcow2(image: Path, raw: Path, key: Path) -> Path:
    header = image.with_suffix(".luks")
    _header(header, key)
    create = ["-f", "qcow2", "-o", f"cluster_size={CLUSTER_BYTES}", image.name, str(raw.stat().st_size)]
    qemu("qemu-img", "create", "-q", *create, cwd=image.parent)
    with image.open("r+b") as file:
        head = file.read(CLUSTER_BYTES)
        at = -(-image.stat().st_size // CLUSTER_BYTES) * CLUSTER_BYTES
        file.seek(at)
        file.write(header.read_bytes().ljust(PAYLOAD_AT, b"\0"))
        # Each cluster is counted by 16 bits.
        blocks_at = int.from_bytes(head[48:56], "big")
        file.seek(blocks_at)
        file.seek(int.from_bytes(file.read(8), "big") + at // CLUSTER_BYTES * 2)
        file.write(b"\0\1" * (PAYLOAD_AT // CLUSTER_BYTES))
        file.seek(32)
        file.write(ENCRYPTED_BY_LUKS.to_bytes(4, "big"))
        file.seek(int.from_bytes(head[100:104], "big"))
        fields = ((ENCRYPTION, 4), (16, 4), (at, 8), (PAYLOAD_AT, 8), (0, 8))
        file.write(b"".join(value.to_bytes(length, "big") for value, length in fields))
    header.unlink()
    return _filled(image, raw, key, f"driver=qcow2,encrypt.key-secret=s,file.filename={image.name}")


def _header(image: Path, key: Path) -> None:
    """Its key is worth a thousand rounds, the least that cryptsetup takes."""
    with image.open("wb") as file:
        file.truncate(PAYLOAD_AT + MIB)
    quick = ["--type", "luks1", "--key-size", "512", "--pbkdf-force-iterations", "1000"]
    words = [need("cryptsetup", "cryptsetup-bin"), "-q", *quick, "--key-file", str(key), "luksFormat", str(image)]
    subprocess.run(words, check=True, capture_output=True, timeout=60)
    with image.open("r+b") as file:
        file.truncate(PAYLOAD_AT)


def _filled(image: Path, raw: Path, key: Path, target: str) -> Path:
    secret = ["--object", f"secret,id=s,file={key.name}"]
    qemu("qemu-img", "convert", "-n", *secret, "-f", "raw", "--target-image-opts", raw.name, target, cwd=image.parent)
    return image
