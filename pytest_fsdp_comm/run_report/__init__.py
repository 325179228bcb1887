"""The report that ``--comm-report`` writes: what it is made from, collected from every test."""
