"""Name, write, read and compare snapshot files, and find those that no test uses."""
