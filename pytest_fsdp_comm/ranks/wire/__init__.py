"""What goes between processes, and how: messages, channels, stores, results.

Knows no other room of ranks.
"""
