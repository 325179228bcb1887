"""The results of a session for reviewers in CI: a Markdown summary and GitHub annotations."""
