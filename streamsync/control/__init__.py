"""The control plane: who is there, which version is next, and what every rank does about it."""
