"""The report that ``--comm-report`` writes, collected from every test."""
