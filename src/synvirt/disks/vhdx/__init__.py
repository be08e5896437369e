"""VHDX ([MS-VHDX]): header.py and log.py give the file a consistent state, reader.py reads it."""
