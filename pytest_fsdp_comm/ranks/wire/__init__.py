"""Messages between processes, the channel that carries them, and the results of ranks."""
