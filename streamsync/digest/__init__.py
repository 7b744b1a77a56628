"""The composable digest: what it is, and how the data path computes it."""
