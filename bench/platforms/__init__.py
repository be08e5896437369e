"""One script a platform: its VMs listed, and a disk read against the platform's own tools or nbdcopy. `listed` is what all
have."""
