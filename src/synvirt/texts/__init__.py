"""Texts of others: what of them a terminal may get (`printable.py`), and JSON that says each thing once (`json_once.py`)."""
