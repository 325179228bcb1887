"""Whatever a rank prints, its report and the time that it takes stay bounded."""

import re
import signal
import sys
import time
import xml.etree.ElementTree as ET

import pytest
import running
from running import stories, wait_for

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

SOURCE = """
import logging, os, sys, time
import pytest

@pytest.mark.distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_endless(dist_info):
    if dist_info.rank == 1:
        return
    print("the first line")
    for number in range(1, 30_000):
        print("x" * 1000, number)
    time.sleep(1000)

@pytest.mark.distributed(world_size=2, timeout_s=60)
def test_one_long_line_before_death(dist_info):
    sys.stdout.write("the first word ")
    for _ in range(3000):
        sys.stdout.write("y" * 1000)
    if dist_info.rank == 0:
        sys.stdout.write(" the last word")
        sys.stdout.flush()
        os._exit(3)
    time.sleep(1000)

@pytest.mark.distributed(world_size=2, timeout_s=60)
def test_log():
    logging.getLogger("mine").warning("z" * 3_000_000)
    assert 0

@pytest.mark.distributed(world_size=2, timeout_s=60)
def test_phases(two_phases):
    print("b" * 400_000)
    print("c" * 400_000, file=sys.stderr)
    assert 0

@pytest.fixture
def two_phases():
    print("a" * 400_000)

@pytest.mark.distributed(world_size=2, timeout_s=60)
def test_subtest(subtests):
    with subtests.test("much"):
        print("d" * 3_000_000, "the end")
        assert 0
"""
TIMES = """
import time
import pytest

@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    started_at = time.monotonic()
    result = yield
    with open("times", "a") as file:
        print(item.name, time.monotonic() - started_at, file=file)
    return result
"""
LEFT_OUT = re.compile(r"^\[\.\.\. ([\d,]+) (?:bytes|characters) left out: ", re.MULTILINE)
PYTEST = ("-p", "no:cacheprovider")


def count_left_out(text):
    (count,) = LEFT_OUT.findall(text)
    return int(count.replace(",", ""))


def story(output, name):
    (found,) = stories(output, name)
    return found


def check_endless(output):
    endless = story(output, "test_endless")
    assert re.search("ranks? 0(-1)? did not finish within", endless)
    assert "the first line\n" in endless
    assert len(endless) < 1_000_000
    left_out = count_left_out(endless)
    assert left_out > 10_000_000
    numbers = [int(line.split()[1]) for line in re.findall(r"^x{1000} \d+$", endless, re.MULTILINE)]
    assert len(numbers) > 450
    assert numbers[0] == 1
    # The end is there, too: all but the last line, in which it was ended.
    assert numbers[-1] * 1010 > left_out


def test_output_is_kept_up_to_a_limit(pytester):
    pytester.makeconftest(TIMES)
    limit_s = extend_under_load(4)
    pytester.makepyfile(test_it=SOURCE.replace("TIMEOUT_S", str(limit_s)))
    arguments = () if pytest.version_tuple >= (9,) else ("--deselect", "test_it.py::test_subtest")
    result = pytester.runpytest_subprocess(
        *PYTEST, "--junitxml=j.xml", *arguments, timeout=extend_under_load(100)
    )
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "INTERNALERROR" not in result.stdout.str()
    output = result.stdout.str()
    check_endless(output)
    times = dict(line.split() for line in (pytester.path / "times").read_text().splitlines())
    assert float(times["test_endless"]) < 2 * limit_s

    death = story(output, "test_one_long_line_before_death")
    assert "rank 0 exited with status 3" in death
    assert "the first word yyy" in death
    assert "yyy the last word" in death
    assert len(LEFT_OUT.findall(death)) == 2

    left_out = count_left_out(story(output, "test_log"))
    assert 3_000_000 - 524_288 < left_out < 3_000_100 - 524_288
    phases = story(output, "test_phases")
    assert not LEFT_OUT.search(phases)
    assert [phases.count(letter * 400_000) for letter in "abc"] == [1, 1, 1]
    if not arguments:
        assert "ddd the end" in story(output, "test_subtest [much]")
        assert len(LEFT_OUT.findall(story(output, "test_subtest [much]"))) == 1
        assert not LEFT_OUT.findall(story(output, "test_subtest"))

    junit = pytester.path / "j.xml"
    assert junit.stat().st_size < 12_000_000
    assert len(list(ET.parse(junit).iter("testcase"))) == 5 - len(arguments) // 2  # noqa: S314  # our own file


def test_endless_output_is_cut_under_s(pytester):
    pytester.makepyfile(test_it=SOURCE.replace("TIMEOUT_S", str(extend_under_load(4))))
    result = pytester.runpytest_subprocess(
        *PYTEST, "-s", "-k", "test_endless", timeout=extend_under_load(100)
    )
    result.assert_outcomes(failed=1, deselected=4)
    check_endless(result.stdout.str())
    echoed = result.stdout.str().partition("= FAILURES =")[0]
    assert "[rank 0] the first line\n" in echoed


LONG_TEXTS = """
import os, sys, time, warnings
import pytest

pytestmark = pytest.mark.distributed(world_size=2, timeout_s=60)

def test_raise():
    raise ValueError("x" * 50_000_000)

def test_other_words(record_property):
    warnings.warn("u" * 5_000_000)
    record_property("text", "p" * 5_000_000)
    record_property("values", list(range(1_000_000)))
    record_property("few", [1, 2])
    pytest.skip("s" * 5_000_000)

def test_passing():
    pass

def test_exit():
    pytest.exit("e" * 5_000_000)
"""


def test_no_text_is_sent_or_kept_whole(pytester):
    pytester.makepyfile(test_it=LONG_TEXTS)
    result = pytester.runpytest_subprocess(
        *PYTEST, "--junitxml=j.xml", timeout=extend_under_load(200)
    )
    output = result.stdout.str()
    assert "INTERNALERROR" not in output
    result.assert_outcomes(passed=1, failed=1, skipped=1, warnings=2)
    kept = 524_288
    # What pytest shows of the function is part of the text.
    shown = (
        '    def test_raise():\n>       raise ValueError("x" * 50_000_000)\nE       ValueError: '
    )
    assert count_left_out(story(output, "test_raise")) == len(shown) + 50_000_000 - kept
    assert count_left_out(output.partition("outcomes.Exit: ")[2]) == 5_000_000 - kept
    junit = pytester.path / "j.xml"
    assert junit.stat().st_size < 12_000_000
    root = ET.parse(junit).getroot()  # noqa: S314  # our own file
    values = {found.get("name"): found.get("value") for found in root.iter("property")}
    assert values["few"] == "[1, 2]"
    assert count_left_out(values["text"]) == 5_000_000 - kept
    assert count_left_out(values["values"]) == len(str(list(range(1_000_000)))) - kept
    (skipped,) = (case.get("message") for case in root.iter("skipped"))
    assert count_left_out(skipped) == len("Skipped: ") + 5_000_000 - kept


ENDLESS = """
import pathlib
import pytest

@pytest.mark.distributed(world_size=2, timeout_s=TIMEOUT_S)
def test_endless(subtests):
    while True:
        with subtests.test():
            pathlib.Path("started").touch()
            raise ValueError("x" * 2_000_000)
"""


@pytest.mark.skipif(pytest.version_tuple < (9,), reason="has no subtests")
@pytest.mark.parametrize(
    "ends", ["at the deadline", pytest.param("by Ctrl-C", marks=pytest.mark.release)]
)
def test_long_messages_without_end_keep_no_session(tmp_path, ends):
    is_stopped = ends == "by Ctrl-C"
    source = ENDLESS.replace("TIMEOUT_S", str(1000 if is_stopped else extend_under_load(2)))
    (tmp_path / "test_it.py").write_text(source)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    arguments = ("-q", "--tb=line", "test_it.py")
    python = sys.executable if is_stopped else running.PYTHON
    session = running.start(tmp_path, *arguments, python=python)
    wait_for((tmp_path / "started").exists)
    if is_stopped:
        time.sleep(1.0)
        session.send_signal(signal.SIGINT)
    output, _ = session.communicate(timeout=extend_under_load(50))
    if is_stopped:
        assert session.returncode == pytest.ExitCode.INTERRUPTED
    else:
        assert session.returncode == pytest.ExitCode.TESTS_FAILED
        assert "ranks 0-1 did not finish within" in output
    assert not list(tmp_path.glob("fsdp-comm*"))
