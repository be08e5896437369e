"""Inspection of untrusted files and restore points by confined child processes.

`looking.py` is the service's side; `looker.py` is the process that forks a child for each inspection; `look.py` has what they
say to each other; `points.py` has both sides for the manifests and domain XML of restore points.
"""
