"""HTML pages about a run; jinja2 is imported only when a page is rendered."""
