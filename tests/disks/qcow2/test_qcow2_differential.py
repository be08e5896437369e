"""Any qcow2 image that qemu-img and qemu-io can make reads as they read it: bytes, extents, in any order."""

from hypothesis import given

from synvirt.disks import open_reader
from synvirt.disks.specs import ImageSpec, RawSpec
from tests.cases import cases
from tests.disks.block_images import assert_knows_zeros_of_qemu, assert_same_disk, bytes_of, raw_of, reads, scratch
from tests.disks.qcow2.qcow2_images import Layer, chains, make


@cases(100)
@given(chain=chains(), places=reads)
def test_any_image_reads_as_qemu_reads_it(chain: tuple[Layer, ...], places: list[tuple[float, int]]) -> None:
    with scratch() as folder:
        image = make(chain, folder)
        raw = raw_of(image, "qcow2")
        spec = ImageSpec(format="qcow2", over=RawSpec(path=str(image)), root=str(folder), name=image.name)
        reader = open_reader(spec)
        try:
            assert_same_disk(reader, raw, places)
            assert_knows_zeros_of_qemu(reader, image, "qcow2")
            assert bytes_of(reader, 0, reader.size) == raw.read_bytes()
        finally:
            reader.close()
