"""The report that ``--comm-report`` writes: what it is made from, collected from every test.

In: what fixtures note, and pytest's reports. Out: files. May know every room but `plugin`; how a
page looks is decided in `reports/html/`.
"""
