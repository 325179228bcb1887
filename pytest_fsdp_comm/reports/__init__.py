"""Write results for people: failure texts, drawn trees, HTML pages, and summaries for CI."""
