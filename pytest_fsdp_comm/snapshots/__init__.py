"""Name, write, read and compare snapshot files, and find unused files."""
