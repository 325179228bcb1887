"""A session as a reviewer meets it in CI: a summary in Markdown, annotations of GitHub.

In come outcomes of tests, out goes text that fits the limits of its place. Knows neither pytest nor
the environment: what runs on GitHub is told as a value.
"""
