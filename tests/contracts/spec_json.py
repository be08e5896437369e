"""Specs as JSON, as an order to a worker carries them: `READER_SPEC.dump_json(spec)`, `READER_SPEC.validate_json(content)`."""

from pydantic import TypeAdapter

from synvirt.disks.specs import ChecksumSpec, ReaderSpec

READER_SPEC: TypeAdapter[ReaderSpec] = TypeAdapter(ReaderSpec)
CHECKSUM_SPEC: TypeAdapter[ChecksumSpec] = TypeAdapter(ChecksumSpec)
