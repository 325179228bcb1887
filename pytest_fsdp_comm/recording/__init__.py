"""Record torch's communication: one immutable event for each collective."""
