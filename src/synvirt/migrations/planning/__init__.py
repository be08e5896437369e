"""A plan before its job copies anything: refused or accepted, dry-run, and forecast.

Read `intake.py`, then `foreseen.py` and `outage.py`.
"""
