"""What torch sends, watched while it does: one immutable event for each collective."""
