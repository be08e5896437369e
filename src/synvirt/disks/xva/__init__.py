"""Disks in XVA archives: reader.py for plain archives, stream.py for packed ones, pieces.py for both."""
