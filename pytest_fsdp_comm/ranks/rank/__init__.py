"""The code that runs inside a rank: pytest's protocol for each of the rank's tests."""
