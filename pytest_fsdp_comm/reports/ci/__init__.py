"""A session as a reviewer meets it in CI: a summary in Markdown, annotations of GitHub.

Outcomes of tests come in; text that fits the limits of its place goes out.
"""
