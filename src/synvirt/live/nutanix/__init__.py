"""prism_api: Nutanix AHV."""
