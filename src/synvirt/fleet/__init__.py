"""Fleet: many VMs moved in waves, in an order, within windows.

A **wave** is a job whose members are migrations. A **member** is one VM with its plan. A **window** is the time in which
members may
cut over. Read `model.py` first: it has every noun.
"""
