"""The GUIDs in images, as text of 36 characters in small letters.

The standard library's `uuid` also makes new ones, so it loads `platform` and its patterns: that was 10 of the 134 million
instructions in which a VHDX of 1 MiB was copied.
"""


def guid(content: bytes) -> str:
    """A GUID of 16 bytes in the order of its text (RFC 9562)."""
    digits = content.hex()
    return f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"


def guid_le(content: bytes) -> str:
    """A GUID as Microsoft and VirtualBox write it: the first three parts have their lowest byte first."""
    return guid(content[3::-1] + content[5:3:-1] + content[7:5:-1] + content[8:])
