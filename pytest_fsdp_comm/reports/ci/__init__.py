"""A session as a reviewer meets it in CI: a summary in Markdown, annotations of GitHub.

In come outcomes of tests, out goes text that fits the limits of its place. Knows neither pytest nor
the environment: where the session runs comes in as a value.
"""
