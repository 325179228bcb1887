"""HTML pages about a run; jinja2 is only imported to render one."""
