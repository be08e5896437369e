"""The top level of a virtio driver image: an ISO 9660 file, or a folder with the same content.

ISO 9660 (ECMA-119), sections 8 (volume descriptors) and 9.1 (directory records); Joliet's names are UCS-2, big-endian.
"""

from pathlib import Path

from synvirt.errors import V2vFailed

SECTOR_BYTES = 2048
FIRST_DESCRIPTOR = 16
# A real image has three or four descriptors, and a top folder of a few sectors.
DESCRIPTORS_MAX = 32
FOLDER_BYTES_MAX = 1 << 20
PRIMARY, SUPPLEMENTARY, TERMINATOR = 1, 2, 255


def top_names(image: Path) -> set[str]:
    """The names at the top of the image, in lower case. V2vFailed, where it is not such an image."""
    if image.is_dir():
        return {path.name.lower() for path in image.iterdir()}
    try:
        content = _top_folder(image)
    except OSError as error:
        raise V2vFailed(f"the virtio driver image {image.name} cannot be read: {error.strerror}") from error
    if content is None:
        raise V2vFailed(
            f"the virtio driver image {image.name} is not an ISO 9660 image",
            hint="fetch virtio-win.iso again and compare its size",
        )
    folder, encoding = content
    return {name.split(";")[0].rstrip(".").lower() for name in _names(folder, encoding)}


def _top_folder(image: Path) -> tuple[bytes, str] | None:
    """The bytes of the top folder and the encoding of its names. Joliet's, where it exists, as ISO 9660 shortens names."""
    found: tuple[bytes, str] | None = None
    with image.open("rb") as file:
        for number in range(DESCRIPTORS_MAX):
            file.seek((FIRST_DESCRIPTOR + number) * SECTOR_BYTES)
            descriptor = file.read(SECTOR_BYTES)
            if len(descriptor) < SECTOR_BYTES or descriptor[1:6] != b"CD001" or descriptor[0] == TERMINATOR:
                break
            joliet = descriptor[0] == SUPPLEMENTARY and descriptor[88:91] in (b"%/@", b"%/C", b"%/E")
            if descriptor[0] == PRIMARY or joliet:
                record = descriptor[156:190]
                at = int.from_bytes(record[2:6], "little") * SECTOR_BYTES
                length = min(int.from_bytes(record[10:14], "little"), FOLDER_BYTES_MAX)
                file.seek(at)
                found = (file.read(length), "utf-16-be" if joliet else "latin-1")
    return found


def _names(folder: bytes, encoding: str) -> list[str]:
    names = []
    for begin in range(0, len(folder), SECTOR_BYTES):
        sector, at = folder[begin : begin + SECTOR_BYTES], 0
        # A record never crosses a sector; a length of 0 means that the rest of the sector is empty.
        while at + 33 < len(sector) and sector[at]:
            length = sector[at + 32]
            names.append(sector[at + 33 : at + 33 + length].decode(encoding, errors="replace"))
            at += sector[at]
    return names
