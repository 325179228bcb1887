"""The code inside a rank: it runs pytest's protocol for each test of the rank."""
