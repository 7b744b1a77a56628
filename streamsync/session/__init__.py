"""One rank's life: its sessions with peers, and the stages of each sync, driven by the machines."""
