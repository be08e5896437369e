"""The text by which a file is noted: stored notes are read by every later version."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synvirt.disks.noted_files import NotedFile, names_of_changed, noted
from synvirt.disks.specs import ImageSpec, RawSpec, versions
from synvirt.remote import Remote, is_size_alone, version_by

VERSIONS = st.text().filter(lambda text: "\n" not in text)


@pytest.mark.timeout(30)
@given(name=st.text(), version=VERSIONS, later=VERSIONS)
def test_a_note_has_its_file_whatever_the_name_is(name: str, version: str, later: str) -> None:
    file = NotedFile(name, version)
    assert noted(file.text) == file
    assert names_of_changed([file.text], [NotedFile(name, later).text]) == ([] if version == later else [name])


@pytest.mark.timeout(30)
@given(size=st.integers(0, 1 << 60), told=st.text(max_size=40).map(str.strip))
def test_a_version_by_the_size_alone_is_one_of_which_no_more_is_told(size: int, told: str) -> None:
    assert is_size_alone(version_by(size, told)) == (not told)


@pytest.mark.timeout(30)
def test_the_text_is_the_one_that_is_stored() -> None:
    file = RawSpec(path="a.qcow2", remote=Remote(url="https://h/"), version="5 x")
    assert [each.text for each in versions(ImageSpec(format="qcow2", over=file))] == ["https://h/a.qcow2\n5 x"]
