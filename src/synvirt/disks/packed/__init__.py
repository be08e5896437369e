"""Compressed bytes: inflate.py and zstd.py unpack blocks of known size, gzipped.py gives any offset of a gzip file,
unpacking.py and zstd_stream.py read a packed file from front to back."""


class Damaged(Exception):
    """What is packed is not what it says, or ends before its time. For the reader to translate: it knows where this was."""
