"""A run as pages of HTML.

In: what tests compared and recorded, as `values`. Out: the text of each page, complete in itself.
May know the rooms that `reports` may know; jinja2 is imported when a page is made.
"""
