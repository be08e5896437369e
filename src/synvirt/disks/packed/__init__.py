"""Compressed bytes: inflate.py and zstd.py unpack blocks of known size, one or a batch of them (batches.py); gzipped.py gives
any offset of a gzip file; unpacking.py and zstd_stream.py read a packed file from front to back."""


class Damaged(Exception):
    """The packed data is wrong or ends too early. The reader translates this, as it knows the place.

    `at`: of a batch, the place in the buffer of the stream that is meant.
    """

    at = 0
