"""The pages of waves: `night.py` shows them, `new.py` makes them."""
