import os
import resource

import pytest


@pytest.fixture
def few_descriptors():
    """Leaves this process, and others with as many, a number of descriptors, as ``ulimit -n``."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def leave(count, *pids):
        free = [os.dup(0) for _ in range(count)]
        limits = (max(free) + 1, before[1])
        for descriptor in free:
            os.close(descriptor)
        for pid in (0, *pids):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)

    yield leave
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
