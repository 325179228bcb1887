"""Time limits grow with the load of the machine."""

import pytest

from pytest_fsdp_comm.ranks.wire.load import extend_under_load


@pytest.mark.parametrize(
    ("load", "cores", "seconds"), [(0.5, 2, 3.0), (4.0, 2, 3.0), (12.0, 2, 9.0), (4.0, None, 6.0)]
)
def test_under_load_scales_a_busy_machines_limits(monkeypatch, load, cores, seconds):
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert extend_under_load(3.0) == seconds
