"""The endpoints, a module for each resource: each reads a request, calls one room below, and answers.

Read `migrations.py` first.
"""
