"""A run as pages of HTML."""
# Values in, texts of pages out, each complete in itself; jinja2 is imported when a page is made.
