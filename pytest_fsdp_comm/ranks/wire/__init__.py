"""The messages between pytest and its ranks, the channel that sends them, and ranks' results."""
