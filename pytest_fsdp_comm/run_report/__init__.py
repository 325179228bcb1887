"""The report that ``--comm-report`` writes: what it is made from, collected from every test.

What fixtures note and pytest reports comes in; files go out. `reports/html/` decides how a page
looks.
"""
