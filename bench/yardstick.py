"""python -SP yardstick.py SOURCE TARGET: the least that a copy by Python is, against which ours is held in bench.quick.

It starts an interpreter as `synvirt` does, loads what a copy needs of Python's own library, and moves each run of data by
requests of 4 MiB. It has none of our code and never changes, and is made of what ours is made of: so the ratio
of both hangs little on the machine, where that to another program in another language does.
"""

import argparse
import dataclasses
import functools
import json
import mmap
import os
import pathlib
import struct
import sys
import threading
import typing

REQUEST_BYTES = 4 << 20
_LOADED = (argparse, dataclasses, functools, json, pathlib, struct, threading, typing)


def main() -> None:
    source, target = sys.argv[1:]
    read, write = os.open(source, os.O_RDONLY), os.open(target, os.O_RDWR | os.O_CREAT, 0o600)
    size = os.fstat(read).st_size
    os.ftruncate(write, size)
    buffer = mmap.mmap(-1, REQUEST_BYTES)
    view = memoryview(buffer)
    at = 0
    while at < size:
        try:
            at = os.lseek(read, at, os.SEEK_DATA)
        except OSError:  # ENXIO: only a hole is left
            break
        end = os.lseek(read, at, os.SEEK_HOLE)
        while at < end:
            count = os.preadv(read, [view[: min(REQUEST_BYTES, end - at)]], at)
            os.pwrite(write, view[:count], at)
            at += count


if __name__ == "__main__":
    main()
