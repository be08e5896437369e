"""Texts of others for a terminal: names come from hostile archives, hosts and guests, and must not control it.

`json_once.py`: JSON in which no name is given twice.
"""

import re

# What a terminal, or the order of what it shows, may be controlled by: C0 without a tab and the ends of lines, C1, bidi.
_CONTROLS = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """A text for people, in which only line ends are no characters to be seen."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character == "\n" else "\N{REPLACEMENT CHARACTER}" for character in text
    )


def escaped_json(text: str) -> str:
    """The same JSON, with escapes in place of such characters."""
    return _CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
