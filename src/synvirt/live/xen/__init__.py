"""xen_api: XenServer and XCP-ng."""
