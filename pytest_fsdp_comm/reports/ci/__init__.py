"""Format a session's results for reviewers in CI: a Markdown summary and GitHub annotations."""
