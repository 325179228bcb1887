"""Write results for people to read: failure texts, trees, HTML pages, and summaries for CI."""
