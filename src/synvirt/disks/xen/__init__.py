"""VDIs from a XenServer host."""
