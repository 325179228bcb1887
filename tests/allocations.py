"""Measure peak memory from the allocations that torch's CPU allocator reports to its profiler."""

from torch.profiler import ProfilerActivity, profile


def peak_allocated_nbytes(run):
    """Return by how many bytes a function raised the allocated memory at most."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = profiled.profiler.kineto_results.events()
    allocations = [event for event in events if event.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(allocations, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    assert peak > 0
    return peak
