"""Present results to people: failure texts, trees, HTML pages, and summaries for CI."""
