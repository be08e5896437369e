"""The endpoints, a module a resource: each reads a request, calls one room below, and answers.

`migrations.py` is the one to read first.
"""
