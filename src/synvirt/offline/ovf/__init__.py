"""OVF packages, as folders and as OVA archives.

Read `description.py` (the XML), `package.py` (its files), then `folder.py` and `archive.py`.
"""
