"""VHDX ([MS-VHDX]): header.py and log.py bring the file to one state, reader.py reads it."""
