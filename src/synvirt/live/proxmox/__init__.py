"""pve_api: Proxmox VE."""
