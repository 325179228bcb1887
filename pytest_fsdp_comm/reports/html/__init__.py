"""A run as pages of HTML; jinja2 is imported when a page is made."""
