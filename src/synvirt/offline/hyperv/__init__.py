"""Hyper-V exports.

`export.py` finds the parts; `storage.py` and `xml.py` read a configuration, and `machine.py` interprets it. `tool.py` imports
by an outside tool instead.
"""
