"""What torch's allocator of the CPU gave out and took back, as its profiler was told."""

from torch.profiler import ProfilerActivity, profile


def peak_allocated_nbytes(run):
    """The most bytes that were allocated at once while a function ran, beyond those before it."""
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
