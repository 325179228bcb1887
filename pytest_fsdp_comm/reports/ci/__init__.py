"""A session as a reviewer meets it in CI: a summary in Markdown, annotations of GitHub."""
