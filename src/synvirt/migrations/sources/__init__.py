"""The registered platforms. `registered.py` has their rows and sessions; `probing.py` and `trials.py` test them."""
