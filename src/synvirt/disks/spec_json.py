"""Reads and writes specs as JSON: `READER_SPEC.dump_json(spec)`, `READER_SPEC.validate_json(content)`."""

from pydantic import TypeAdapter

from synvirt.disks.specs import ChecksumSpec, ReaderSpec, WriterSpec

READER_SPEC: TypeAdapter[ReaderSpec] = TypeAdapter(ReaderSpec)
WRITER_SPEC: TypeAdapter[WriterSpec] = TypeAdapter(WriterSpec)
CHECKSUM_SPEC: TypeAdapter[ChecksumSpec] = TypeAdapter(ChecksumSpec)
