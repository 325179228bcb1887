"""What runs inside one rank: the whole pytest protocol of a test."""
