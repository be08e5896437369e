"""The pages of backups: `jobs.py`, `points.py`, `repositories.py`; `words.py` has the words for them."""
