"""XVA, the export format of XenServer and XCP-ng.

`archive.py` is today's form, `ova_xml.py` its description, `geneva.py` the oldest form.
"""
