"""Values as people read them: in a failed test, on a terminal, in a browser."""
