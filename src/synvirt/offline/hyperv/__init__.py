"""Hyper-V exports.

`export.py` finds the parts; `storage.py` and `xml.py` read a configuration, `machine.py` says what it means; `tool.py` is the
other way.
"""
