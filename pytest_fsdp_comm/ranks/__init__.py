"""A test on its ranks: started, watched, judged."""
