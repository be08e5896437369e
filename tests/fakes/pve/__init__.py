"""A stand-in of Proxmox VE's API. Read in this order:

api.json    what the vendor's own schema says of the calls we make: names, types, permissions (its first line names the source)
schema.py   a request, or an answer, held against that
cluster.py  the state: nodes, VMs, tasks, users and what they may do
server.py   the HTTP side: TLS, tickets, tokens

It answers nothing that the schema does not know, and refuses a request that Proxmox VE would refuse.
"""
