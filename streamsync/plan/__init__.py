"""Planning: who sends which box to whom, proved before a byte moves. Pure."""
