"""Fleet: many VMs moved in waves, in an order, within windows.

A **wave** is a job whose members are migrations. A **member** is one VM with its plan. A **window** is the time in which
members may cut over. Read `model.py` first: it has every noun. Then:

    what to do now   scheduling.py, by standing.py (which member holds which) and reasons.py (why a member waits); order.py,
                     windows.py, openings.py, queueing.py, facts.py, words.py
    where            placement.py (pure), placing.py (of waves under way), listed_vms.py
    done             carrying.py (the leader), host_side.py (the host of a job), sharing.py
    forecast         forecasting.py, simulation/, gantt.py
    in and out       sheets/, querying.py, reporting.py
    notifications    webhooks/
"""
