"""Starts and ends the processes of a `wire.messages.RankSetSpec`, within bounds."""
