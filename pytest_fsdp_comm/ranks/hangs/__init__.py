"""Where ranks are when they do not come to an end, and who waits for whom."""
