"""pytest's features work in ranks."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import pytest

SOURCE = """
import logging
import os
import unittest
import warnings

import pytest
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=2)

@pytest.fixture(scope="session")
def session_directory(tmp_path_factory):
    return tmp_path_factory.mktemp("shared")

@pytest.fixture(scope="module")
def module_value():
    return dist.get_rank()

def test_fixtures(
    session_directory, module_value, dist_info, tmp_path, monkeypatch, capsys, caplog, recwarn
):
    assert module_value == dist_info.rank == int(os.environ["RANK"])
    print("captured")
    assert capsys.readouterr().out == "captured\\n"
    logging.getLogger("mine").warning("logged")
    assert [record.message for record in caplog.records] == ["logged"]
    warnings.warn("seen", stacklevel=1)
    assert len(recwarn) == 1
    (tmp_path / "file").write_text(str(dist_info.rank))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    (session_directory / "file").write_text(str(dist_info.rank))
    assert (session_directory / "file").read_text() == str(dist_info.rank)

def test_capfd(capfd):
    os.write(1, b"raw")
    assert capfd.readouterr().out == "raw"

def test_failing(record_property, dist_info):
    record_property("ranks", dist_info.world_size)
    record_property("rank", dist_info.rank)
    if dist_info.rank == 1:
        record_property("of rank 1", "alone")
    print("said by", dist_info.rank)
    logging.getLogger("mine").error("logged before the failure")
    assert {"a": 1, "b": [1, 2]} == {"a": 1, "b": [1, 3]}

class TestUnittest(unittest.TestCase):
    def setUp(self):
        self.world_size = dist.get_world_size()

    def test_method(self):
        self.assertEqual(self.world_size, 2)

class TestClass:
    @classmethod
    def setup_class(cls):
        cls.rank = dist.get_rank()

    @pytest.mark.parametrize("value", [1, 2])
    def test_parametrized(self, value):
        assert self.rank in (0, 1)

def test_warning():
    warnings.warn("only once", UserWarning, stacklevel=1)
"""


@pytest.fixture
def run(pytester):
    pytester.makepyfile(test_it=SOURCE)
    pytester.makeini("[pytest]\njunit_family = xunit1")
    return pytester.runpytest_subprocess


def test_durations_and_last_failed_in_one_session(run, pytester):
    result = run("-v", "--junitxml=report.xml", "--durations=3")
    result.assert_outcomes(passed=6, failed=1, warnings=1)
    shown = result.stdout.str()
    # Assertion rewriting, and both ranks' output.
    assert "At index 1 diff" in shown or "Differing items" in shown
    assert "said by 0" in shown
    assert "said by 1" in shown
    assert shown.count("ERROR    mine:test_it.py") == 1, "equal logs of ranks are folded"
    assert shown.count("UserWarning: only once") == 1
    result.stdout.fnmatch_lines(["*slowest 3 durations*"])
    root = ET.parse(pytester.path / "report.xml").getroot()  # noqa: S314  # our own file
    cases = {case.get("name"): case for case in root.iter("testcase")}
    assert len(cases) == 7
    assert cases["test_failing"].find("failure") is not None

    def properties(element):
        found = [(one.get("name"), one.get("value")) for one in element.find("properties")]
        assert len(found) == len(set(found))
        return dict(found)

    assert properties(cases["test_failing"]) == {
        "ranks": "2", "rank (rank 0)": "0", "rank (rank 1)": "1", "of rank 1": "alone"
    }  # fmt: skip

    result = run("--lf")
    result.assert_outcomes(failed=1)
    assert "test_capfd" not in result.stdout.str()


def test_exitfirst_and_maxfail_stop_the_session(run):
    run("-x", "-p", "no:cacheprovider").assert_outcomes(passed=2, failed=1)
    run("--maxfail=1", "-n", "2", "-p", "no:cacheprovider", "-k", "failing").assert_outcomes(
        failed=1
    )


def test_warnings_as_errors_fail_no_passing_test(run):
    result = run("-W", "error", "-p", "no:cacheprovider", "-k", "warning or capfd or Class")
    result.assert_outcomes(passed=3, failed=1, deselected=3)


def test_a_collection_warning_is_shown_once(pytester):
    pytester.makepyfile(
        """
        import warnings
        import pytest

        warnings.warn("at import", UserWarning, stacklevel=1)

        @pytest.mark.distributed(world_size=2)
        @pytest.mark.parametrize("number", [1, 2])
        def test_it(number): pass
        """
    )
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=2, warnings=1)


def test_output_without_capture_names_its_rank(run):
    # Nor are these plugins of pytest needed.
    off = ("tmpdir", "faulthandler", "cacheprovider", "logging", "unraisableexception")
    result = run("-s", "-k", "failing", *(f"-pno:{name}" for name in off))
    result.assert_outcomes(failed=1, deselected=6)
    result.stdout.fnmatch_lines_random(["*[[]rank 0] said by 0", "*[[]rank 1] said by 1"])


@pytest.mark.release
def test_output_to_a_file_is_printed_once(pytester, monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    pytester.makepyfile(
        "import pytest\n@pytest.mark.distributed(world_size=2)\ndef test_it():\n    pass"
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest"], capture_output=True, text=True, check=True
    )
    assert result.stdout.count("test session starts") == 1


@pytest.mark.release
def test_coverage_measures_every_rank(pytester):
    pytest.importorskip("coverage")
    pytester.makepyfile(
        code="""
        def by_rank(rank):
            if rank == 0:
                return "first"
            return "second"
        """,
        test_it="""
        import pytest
        from torch import nn

        @pytest.mark.distributed(world_size=2, scope="module")
        @pytest.mark.parametrize("time", [1, 2])
        def test_it(dist_info, time):
            import code_of_mine

            assert code_of_mine.by_rank(dist_info.rank) == ("first", "second")[dist_info.rank]
        """,
    )
    (pytester.path / "code.py").rename(pytester.path / "code_of_mine.py")
    (pytester.path / ".coveragerc").write_text(
        "[run]\nparallel = true\nbranch = true\nsource_pkgs = code_of_mine\n"
    )
    for arguments in (
        ("run", "-m", "pytest", "-p", "no:cacheprovider"),
        ("combine",),
        ("report", "--fail-under=100"),
    ):
        result = pytester.run(sys.executable, "-m", "coverage", *arguments)
        assert result.ret == 0, result.outlines
        # Of the pytest process, which runs no line of this code.
        assert "CoverageWarning" not in f"{result.stdout}{result.stderr}"


@pytest.mark.release
def test_coverage_of_one_file_is_left_to_pytest(pytester):
    pytest.importorskip("coverage")
    pytester.makepyfile("""
        import pytest

        @pytest.mark.distributed(world_size=2)
        @pytest.mark.parametrize("time", [1, 2])
        def test_ranks(time): pass
    """)
    result = pytester.run(sys.executable, "-m", "coverage", "run", "--source=.", "-m", "pytest")
    result.assert_outcomes(passed=2)
    report = pytester.run(sys.executable, "-m", "coverage", "report")
    assert report.ret == 0, report.outlines


def test_setup_show_names_the_rank_of_each_fixture(run):
    result = run("--setup-show", "-p", "no:cacheprovider", "-k", "capfd or fixtures")
    result.assert_outcomes(passed=2, deselected=5)
    result.stdout.fnmatch_lines_random(
        ["*[[]rank 0] *SETUP    F capfd*", "*[[]rank 1] *SETUP    M module_value*"]
    )
