"""A plan before its job moves a byte: refused or accepted, foreseen, forecast.

Read `intake.py`, then `foreseen.py` and `outage.py`.
"""
