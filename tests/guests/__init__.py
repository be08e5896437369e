"""Guests made ready to run here."""
