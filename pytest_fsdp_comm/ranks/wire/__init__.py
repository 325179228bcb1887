"""What goes between processes, and how: messages, channels, stores, results."""
