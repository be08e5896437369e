"""The commands of an operator: hosts, settings, destinations, the check of an installation, what support needs."""
