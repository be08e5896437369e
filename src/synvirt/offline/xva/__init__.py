"""XVA, as XenServer and XCP-ng export VMs.

`archive.py` is today's form, `ova_xml.py` its description, `geneva.py` the oldest form.
"""
