"""Values in untrusted descriptions: cleaned or refused before they are used as names and numbers."""

import re

# Names become file names, domain names and log lines.
_NAME_MAX_CHARS = 255
# The encodings of VMware's programs, by the host's language; Python has others that take minutes for a file.
_ENCODINGS = re.compile(
    r"utf-?8|us-ascii|iso-?8859-?\d{1,2}|(cp|windows-)\d{3,4}|windows-31j|gbk|gb2312|gb18030|big5|shift_jis|euc-(jp|kr)|koi8-r"
    r"|tis-620"
)


def clean(value: str) -> str:
    """One line, without control characters, short enough for every file system."""
    if not value.isprintable():  # few are not; a description has thousands of names
        value = "".join(character if character.isprintable() else " " for character in value)
    return " ".join(value.split())[:_NAME_MAX_CHARS]


def vmware_encoding(named: str) -> str:
    """Python's name for the encoding that a file of VMware names; UTF-8 for one that no host has. Python may not know it."""
    known = named.lower()
    return known.replace("windows-", "cp").replace("cp31j", "cp932") if _ENCODINGS.fullmatch(known) else "utf-8"


def whole_number(value: str) -> int | None:
    """Digits that fit a signed 64-bit number; int() would also take signs, underscores and digits of other scripts."""
    return int(value) if value.isascii() and value.isdigit() and len(value) <= 18 else None


def is_true(value: str | None) -> bool:
    return (value or "").lower() in ("true", "1", "yes")


def uuid_of(*candidates: str) -> str | None:
    """The first candidate that is a UUID: VirtualBox puts braces around it, VMware writes pairs with spaces and a dash."""
    for candidate in candidates:
        digits = re.sub(r"[\s{}-]", "", candidate)
        if re.fullmatch(r"[0-9a-fA-F]{32}", digits):
            from uuid import UUID  # an OVA's disks are opened without it

            return str(UUID(digits))
    return None
