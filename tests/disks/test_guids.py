"""GUIDs are written as by the standard library."""

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.guids import guid, guid_le


@given(st.binary(min_size=16, max_size=16))
def test_a_guid_is_written_as_by_the_standard_library(content: bytes) -> None:
    assert guid(content) == str(UUID(bytes=content))
    assert guid_le(content) == str(UUID(bytes_le=content))
