"""Errors, listings and selection before any rank runs."""

import re
import sys
from pathlib import Path

import pytest

FAULTY = """
import pytest

@pytest.mark.distributed(world_sizes=3)
def test_misspelt(): pass

@pytest.mark.distributed([2, 0])
class TestClass:
    def test_zero(self): pass

def test_plain():
    open("ran", "w").close()
"""
MISSPELT = (
    "test_it.py::test_misspelt: @pytest.mark.distributed: unknown argument 'world_sizes'; "
    "expected one of world_size, backend, simulate, simulation_splits, real, ranks, scope, "
    "timeout_s, device"
)
ZERO = (
    "test_it.py::TestClass::test_zero: @pytest.mark.distributed: world_size: expected a whole "
    "number of ranks from 1 to 256 (to 131072 with the fake backend), got 0"
)


@pytest.fixture
def project(pytester):
    def make(source):
        pytester.makepyfile(test_it=source)
        return pytester

    return make


def test_bad_markers_stop_session_and_name_tests(project):
    pytester = project(FAULTY)
    result = pytester.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: 2 usage errors of pytest-fsdp-comm:"], consecutive=True)
    assert f"\n  {MISSPELT}\n  {ZERO}\n" in result.stderr.str()
    assert not (pytester.path / "ran").exists()
    assert "Traceback" not in result.stdout.str() + result.stderr.str()


@pytest.mark.release
def test_bad_markers_stop_an_xdist_session_too(project):
    pytest.importorskip("xdist")
    pytester = project(FAULTY)
    result = pytester.runpytest_subprocess("-n", "2")
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "2 usage errors of pytest-fsdp-comm:" in result.stdout.str()
    assert MISSPELT in result.stdout.str()
    assert ZERO in result.stdout.str()
    assert not (pytester.path / "ran").exists()
    assert "INTERNALERROR" not in result.stdout.str()


def test_all_bad_options_are_shown_at_once(project):
    pytester = project("def test_it(): pass")
    inis = ("findings = odd", "progress_s = -1", "rank_slots = x")
    lines = "\n".join(f"fsdp_comm_{ini}" for ini in inis)
    pytester.makeini(f"[pytest]\n{lines}\nfsdp_comm_snapshot_dir = __snapshots__")
    result = pytester.runpytest_subprocess(
        *("--world-size", "x", "--comm-backend", "x", "--comm-timeout", "x", "--pdb-rank", "x")
    )
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    head, *told = filter(None, result.stderr.lines)
    assert head == "ERROR: 8 usage errors of pytest-fsdp-comm:"
    assert [line.strip() for line in told[:4]] == [
        "--world-size: expected a whole number of ranks from 1 to 256 (to 131072 with the fake "
        "backend), got 'x'",
        "--comm-backend: expected one of 'gloo', 'nccl', 'fake', got 'x'",
        "--comm-timeout: expected a positive number of seconds, got 'x'",
        "ini fsdp_comm_rank_slots: expected a whole number of ranks, at least 1, got 'x'",
    ]
    assert [line.partition(":")[0].partition(",")[0].strip() for line in told] == [
        *("--world-size", "--comm-backend", "--comm-timeout", "ini fsdp_comm_rank_slots"),
        *("--pdb-rank", "ini fsdp_comm_progress_s"),
        *("ini fsdp_comm_findings", "ini fsdp_comm_snapshot_dir"),
    ]


def test_bad_marker_on_deselected_test_is_ignored(project):
    result = project(FAULTY).runpytest_subprocess("-k", "test_plain")
    result.assert_outcomes(passed=1, deselected=2)


def test_the_command_line_wins_over_ini(project):
    pytester = project("def test_it(): pass")
    pytester.makeini("[pytest]\nfsdp_comm_world_size = 8\nfsdp_comm_backend = fake")
    result = pytester.runpytest_subprocess()
    assert "fsdp-comm: world size 8 unless a test sets one, backend fake" in result.stdout.str()
    result = pytester.runpytest_subprocess("--world-size", "4", "--comm-backend", "gloo")
    assert "fsdp-comm: world size 4 unless a test sets one, backend gloo" in result.stdout.str()


def test_collect_only_lists_and_selects_world_sizes(project):
    pytester = project("""
        import pytest

        @pytest.mark.distributed(world_size=[2, 4])
        @pytest.mark.parametrize("tied", [True, False])
        def test_step(tied): pass
    """)
    result = pytester.runpytest_subprocess("--collect-only", "-q")
    listed = re.findall(r"test_it.py::test_step\[.*\]", result.stdout.str())
    assert sorted(listed) == [
        "test_it.py::test_step[False-ws2]",
        "test_it.py::test_step[False-ws4]",
        "test_it.py::test_step[True-ws2]",
        "test_it.py::test_step[True-ws4]",
    ]
    result = pytester.runpytest_subprocess("--collect-only", "-q", "-k", "ws4 and True")
    result.stdout.fnmatch_lines(["1/4 tests collected (3 deselected)*"])


def test_markers_and_fixtures_are_described(project):
    pytester = project("def test_it(): pass")
    result = pytester.runpytest_subprocess("--markers")
    result.stdout.fnmatch_lines(["@pytest.mark.distributed(world_size=None, ?, backend=None*"])
    for name in ("world_size", "backend", "ranks", "scope", "timeout_s", "device"):
        result.stdout.fnmatch_lines([f"    {name}: *"])
    shown = pytester.runpytest_subprocess("--fixtures", "-v").stdout.str()
    for name in ("comm_mode", "fsdp_tree", "comm_snapshot", "dist_info", "device_mesh"):
        described = re.search(rf"(?m)^{name}\b.* -- .*\n((?:    .*\n|\n(?=    ))+)", shown)
        assert 1 <= len(described[1].splitlines()) <= 5, name


@pytest.mark.cold
def test_torch_is_imported_only_for_distributed_test(project):
    pytester = project("""
        import sys

        def test_plain():
            assert "torch" not in sys.modules
            assert "pytest_fsdp_comm.plugin" in sys.modules
    """)
    pytester.makeconftest("""
        import pathlib, sys

        def pytest_unconfigure():
            late = {"torch", "pytest_fsdp_comm.snapshots.extension"}
            pathlib.Path("imported").write_text(" ".join(late.intersection(sys.modules)))
    """)
    pytester.runpytest_subprocess().assert_outcomes(passed=1)
    # Nor at the end what only a snapshot needs.
    assert (pytester.path / "imported").read_text() == ""


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there are GPUs")
def test_nccl_without_gpus_is_refused_unless_skipped(project):
    pytester = project("""
        import pytest

        @pytest.mark.distributed(2, backend="nccl")
        def test_marker(): pass

        @pytest.mark.distributed(2, backend="nccl")
        @pytest.mark.skipif(True, reason="no GPU here")
        def test_guarded(): pass
    """)
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(errors=1, skipped=1)
    assert (
        "2 ranks need one GPU each (visible: 0); use fewer ranks, backend='gloo'"
    ) in result.stdout.str()


@pytest.mark.release
def test_distributed_tests_run_without_xdist(project):
    pytester = project("""
        import pytest

        @pytest.mark.distributed(2)
        def test_distributed(dist_info): assert dist_info.world_size == 2
    """)
    pytester.runpytest_subprocess("-p", "no:xdist").assert_outcomes(passed=1)


@pytest.mark.cold
@pytest.mark.release
@pytest.mark.parametrize("is_autoloaded", [True, False])
def test_usage_without_syrupy_names_plugin_option(project, monkeypatch, is_autoloaded):
    pytester = project("""
        import pytest

        def test_plain(): pass

        def test_compared(comm_snapshot): pass

        @pytest.mark.distributed(world_size=2)
        def test_ranks(dist_info): pass
    """)
    plugins = ["-p", "no:syrupy"]
    if not is_autoloaded:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        plugins = ["-p", "fsdp_comm"]
    result = pytester.runpytest_subprocess(*plugins)
    result.assert_outcomes(passed=1, failed=1, errors=1)
    assert str(result.stdout).count("syrupy, which is not loaded: add -p syrupy") >= 2
    result = pytester.runpytest_subprocess(*plugins, "-p", "syrupy", "-k", "not compared")
    result.assert_outcomes(passed=2, deselected=1)


@pytest.mark.cold
def test_without_torch_only_tests_that_need_it_fail(project):
    pytester = project("""
        import pytest

        @pytest.mark.distributed(world_size=2)
        def test_ranks(dist_info): pass

        def test_recording(comm_mode): pass

        def test_tree(fsdp_tree): pass

        @pytest.mark.skip
        @pytest.mark.distributed(world_size=2)
        def test_skipped(): pass

        def test_plain(dist_info): pass
    """)
    pytester.makeconftest("""
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] == "torch":
                    raise ModuleNotFoundError(f"No module named {name!r}", name=name)

        sys.meta_path.insert(0, Blocked())
    """)
    for arguments in ([], ["-n2"]):
        result = pytester.runpytest_subprocess(*arguments)
        result.assert_outcomes(passed=1, skipped=1, errors=3)
        _, *reports = re.split(r"\n_+ ERROR at setup of \w+ _+\n", result.stdout.str())
        assert len(reports) == 3
        for report in reports:
            first = report.removeprefix("[gw0] linux").removeprefix("[gw1] linux")
            first = first.split("\n", 1)[1] if first != report else first
            assert first.startswith(
                f"torch is not installed for {sys.executable}, and distributed tests, comm_mode "
                "and fsdp_tree need it: install it ("
            )
