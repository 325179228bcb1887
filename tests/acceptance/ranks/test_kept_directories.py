"""What ranks wrote can be kept, to be looked at when one misbehaves."""

import pytest


@pytest.mark.parametrize("keeps", [True, False])
def test_directories_of_ranks_are_kept_on_demand_only(pytester, monkeypatch, keeps):
    for name in ("kept", "tmp"):
        pytester.mkdir(name)
    monkeypatch.setenv("TMPDIR", str(pytester.path / "tmp"))
    if keeps:
        monkeypatch.setenv("PYTEST_FSDP_COMM_KEEP", "kept/deep")
    pytester.makepyfile("""
        import os
        import pytest

        @pytest.mark.distributed(world_size=2)
        @pytest.mark.parametrize("n", [0, 1])
        def test_prints(n, dist_info):
            os.write(1, f"test {n} of rank {dist_info.rank}\\n".encode())
    """)
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)
    logs = pytester.path.glob("kept/deep/fsdp-comm-*/*/rank?.stdout")
    found = sorted(log.read_text() for log in logs)
    expected = [f"test {n} of rank {rank}\n" for n in (0, 1) for rank in (0, 1)]
    assert found == (expected if keeps else [])
    assert not list(pytester.path.glob("tmp/fsdp-comm-*"))
