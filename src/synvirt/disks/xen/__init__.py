"""VDIs as a XenServer host sends them."""
