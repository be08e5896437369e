"""Waves from spreadsheets, and back. `rows.py` knows the columns, `xlsx.py` the format, `importing.py` makes waves of them."""
