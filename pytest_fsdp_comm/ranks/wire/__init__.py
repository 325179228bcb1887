"""The messages between processes, the channel for them, and the results of ranks."""
