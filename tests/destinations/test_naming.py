"""Labels that people chose, as names of volumes."""

from hypothesis import given
from hypothesis import strategies as st

from synvirt.destinations.naming import sanitized_label
from tests.cases import cases


@cases(100)
@given(st.lists(st.text(max_size=150), min_size=2, max_size=4, unique=True))
def test_labels_that_differ_give_names_that_differ(labels: list[str]) -> None:
    names = [sanitized_label(label) for label in labels]
    assert len(set(names)) == len(labels)
    for name in names:
        assert name.strip(".-") == name or name[0] not in ".-"
        assert 0 < len(name) <= 120
        assert all(char.isascii() and (char.isalnum() or char in "._-") for char in name)


@cases(100)
@given(st.text(max_size=30))
def test_a_name_made_of_a_label_is_no_other_labels_own(label: str) -> None:
    name = sanitized_label(label)
    assert name == label or sanitized_label(name) != name
