"""A value of any length in a message: a person sees its beginning and its end."""

import pytest

from synvirt.errors import (
    BY_CODE,
    LEFT_OUT,
    MESSAGE_CHARS_MAX,
    WORD_CHARS_MAX,
    GuestBootFailed,
    Internal,
    SynvirtError,
    from_code,
    shortened,
)

LONG = "/srv/" + "x" * 10_000 + "/end.ova"
MANY = "web one " * 1250


@pytest.mark.parametrize("text", ["", "short", "w" * WORD_CHARS_MAX, "word " * (MESSAGE_CHARS_MAX // 5)])
def test_a_message_that_can_be_read_is_shown_as_it_is(text: str) -> None:
    assert shortened(text) == text


def test_a_long_word_keeps_its_beginning_and_its_end_and_the_words_around_it() -> None:
    found = shortened(f"there is no file {LONG!r}, and\nno folder {LONG}: look there")
    assert found.startswith("there is no file '/srv/xxx")
    assert f"{LEFT_OUT}xxx" in found
    assert found.count("/end.ova") == 2
    assert found.endswith("/end.ova: look there")
    assert len(found) < 600


def test_a_long_message_of_short_words_keeps_its_beginning_and_its_end() -> None:
    found = shortened(f"there is no machine {MANY!r} here")
    assert found.startswith("there is no machine 'web one")
    assert found.endswith("web one ' here")
    assert len(found) == MESSAGE_CHARS_MAX


@pytest.mark.parametrize("code", BY_CODE)
def test_no_error_repeats_a_long_value_whole(code: str) -> None:
    for value in (LONG, MANY):
        error = from_code(code, f"{value} is not right", hint=f"name another one than {value}")
        assert error.detail.endswith("is not right")
        assert error.hint is not None
        assert error.hint.startswith("name another one than ")
        assert max(len(error.detail), len(error.hint), len(str(error))) <= MESSAGE_CHARS_MAX


def test_what_a_console_showed_last_is_shown_whole() -> None:
    shown = "\n".join("[    0.1] " + "a word " * 21 for _ in range(12))
    assert GuestBootFailed("it did not boot", shown=shown).detail.endswith(shown)
    assert SynvirtError().hint is None
    assert Internal("").detail == Internal.title()
