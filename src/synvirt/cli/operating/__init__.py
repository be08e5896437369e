"""An operator's commands: hosts, settings, destinations, the check of an installation, the bundle for support."""
