"""One pytest process's distributed tests: one rank set at a time, one verdict each."""
