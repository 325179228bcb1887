"""A run as pages of HTML.

What tests compared and recorded comes in, as `values`; the text of each page goes out, complete in
itself. jinja2 is imported when a page is made.
"""
