"""wmi_api: Hyper-V."""
