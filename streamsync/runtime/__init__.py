"""What stages run on: the loop, channels, the pool of leases, the bucket header."""
