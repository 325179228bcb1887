"""Faults on a chosen rank: the right verdict, the right rank first, and the next test passes.

All faults run in one session, each followed by a healthy test.
"""

import re
from dataclasses import dataclass

import pytest
from running import command_lines, start, stories

from pytest_fsdp_comm.ranks.wire.load import extend_under_load

PRELUDE = """
import datetime, os, re, resource, signal, subprocess, sys, threading, time, warnings
import pytest
import torch
import torch.distributed as dist

def rank():
    return int(os.environ["RANK"])

def limit_memory():
    # Beyond what is mapped: torch's CUDA build alone maps more than 2 GiB.
    with open("/proc/self/statm") as file:
        limit = int(file.read().split()[0]) * resource.getpagesize() + (1 << 30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A test whose ranks do different things, and what the user must read."""

    body: str
    """Of a test on 3 ranks."""
    outcome: str = "failed"
    says: tuple[str, ...] = ()
    """Regular expressions that the test's part of the report must match."""
    arguments: str = ""
    decorators: str = ""
    before: str = ""
    """Fixtures."""
    timeout_s: float = 60.0


FAULTS = {
    "exception": Fault(
        body="if rank() == 2: raise LookupError('nothing here')\n    dist.barrier()",
        says=(
            "LookupError: nothing here",
            "rank 2 failed first",
            "ranks 0-1 were still running when the test was stopped",
        ),
    ),
    "assertion": Fault(
        body="print('seen by', rank())\n    assert [rank()] == [7]",
        says=(
            r"assert \[\d\] == \[7\]",
            r"Captured stdout call \(rank 0\) -+\nseen by 0",
            r"Captured stdout call \(rank 2\) -+\nseen by 2",
        ),
    ),
    # Formats its failure for longer than the others are waited for after a failure.
    "slow_report": Fault(
        before="class Slow(list):\n    def __repr__(self):\n"
        "        if rank() == 1: time.sleep(4)\n        return super().__repr__()\n",
        body="assert Slow([1]) == [2]",
        says=(r"E +assert \[1\] == \[2\]", r"\A(?!(.|\n)*still running)"),
    ),
    "skip_all": Fault(body="pytest.skip('not today')", outcome="skipped"),
    "skip_one": Fault(
        body="if rank() == 1: pytest.skip('only me')",
        says=(r"Ranks disagree about the outcome: ranks 0, 2 passed; rank 1 skipped \(only me\)",),
    ),
    "xpass_strict_one": Fault(
        decorators="@pytest.mark.xfail(strict=True, reason='known')",
        body="assert rank() == 1",
        says=(
            r"\[XPASS\(strict\)\] known",
            r"rank 1 failed\nranks 0, 2 failed as expected \(xfail\)\n",
        ),
    ),
    "xfail": Fault(
        body="assert False", decorators="@pytest.mark.xfail(reason='known')", outcome="xfail"
    ),
    "xfail_one": Fault(
        body="assert rank() != 0",
        decorators="@pytest.mark.xfail(strict=False, reason='known')",
        says=("Ranks disagree", r"rank 0 failed as expected \(xfail\)", r"\(xpass\)"),
    ),
    "sys_exit": Fault(
        body="if rank() == 1: sys.exit(4)\n    dist.barrier()", says=("SystemExit: 4", "rank 1")
    ),
    "os_exit": Fault(
        body="if rank() == 1: os._exit(4)\n    dist.barrier()",
        says=(r"rank 1 exited with status 4 \(os._exit, or a crash\) during call",),
    ),
    "sigkill": Fault(
        body="if rank() == 0: os.kill(os.getpid(), signal.SIGKILL)\n    dist.barrier()",
        says=(r"rank 0 was killed by signal 9 \(SIGKILL\) during call",),
    ),
    "sigsegv": Fault(
        body="if rank() == 2: os.kill(os.getpid(), signal.SIGSEGV)\n    dist.barrier()",
        says=(
            r"rank 2 was killed by signal 11 \(SIGSEGV\) during call",
            r"Captured stderr call \(rank 2\) -+\nFatal Python error: Segmentation fault",
        ),
    ),
    "skip_that_others_wait_for": Fault(
        body="if rank() == 1: pytest.skip('only')\n    dist.barrier()",
        says=(
            r"ranks 0, 2 waited for rank 1, which had already skipped the test "
            r"\(only\); all ranks were stopped",
            "ranks 0, 2 wait in barrier #1 of world",
        ),
    ),
    "skip_before_the_group": Fault(
        decorators="@pytest.mark.skipif('rank() == 1', reason='only others')",
        body="pass",
        outcome="error",
        says=(
            r"ranks 0, 2 waited for rank 1, which had already skipped the test \(only others\);",
        ),
    ),
    "wait_that_ends_by_itself": Fault(
        body="if rank() == 1:\n"
        "        work = dist.all_reduce(torch.ones(1), async_op=True)\n"
        "        with pytest.raises(RuntimeError):\n"
        "            work.wait(datetime.timedelta(seconds=4))",
        outcome="passed",
    ),
    "skip_seen_at_the_deadline": Fault(
        body="if rank() == 1: pytest.skip('only')\n    if rank() == 0: dist.recv(torch.ones(1), 1)",
        timeout_s=2,
        says=(r"rank 0 did not finish within [\d.]+ s", r"\nrank 1 skipped the test \(only\)\n"),
    ),
    "hang_in_setup": Fault(
        before="@pytest.fixture\ndef slow():\n    if rank() == 1: time.sleep(1000)\n",
        arguments="slow",
        body="dist.barrier()",  # which the others have come to
        timeout_s=3,
        says=(
            r"did not finish within [\d.]+ s",
            r"all wait for rank 1, which is at .*test_faulty.py:\d+ in slow",
        ),
    ),
    "hang_in_teardown": Fault(
        before="@pytest.fixture\ndef late_sleep():\n    yield\n"
        "    if rank() == 2: time.sleep(1000)\n",
        arguments="late_sleep",
        body="pass",
        outcome="error",
        timeout_s=3,
        says=(r"rank 2 did not finish within [\d.]+ s", "ranks 0-1 had finished"),
    ),
    "out_of_memory": Fault(
        body="if rank() == 1:\n"
        "        limit_memory()\n"
        "        torch.ones(1 << 34)\n"
        "    dist.barrier()",
        says=("rank 1 failed first", "not enough memory|MemoryError|can't allocate"),
    ),
    "thread_left_behind": Fault(
        body="threading.Thread(target=time.sleep, args=(1000,)).start()", outcome="passed"
    ),
    "fork_left_behind": Fault(
        body="if os.fork() == 0: time.sleep(1000)",
        decorators="@pytest.mark.filterwarnings('ignore')",
        outcome="passed",
    ),
    "exception_without_a_repr": Fault(
        before="class Odd(Exception):\n    def __repr__(self): raise ValueError\n"
        "    __str__ = __repr__\n",
        body="raise Odd()",
        says=("test_faulty.Odd|unprintable|Odd",),
    ),
    "skip_one_in_setup": Fault(
        before="@pytest.fixture\ndef picky():\n    if rank() == 0: pytest.skip('not me')\n",
        arguments="picky",
        body="pass",
        says=(r"Ranks disagree about the outcome: rank 0 skipped \(not me\); ranks 1-2 passed",),
    ),
    "closed_stdout": Fault(
        body="os.close(1)\n    os.close(2)\n    assert rank() != 0, 'still reported'",
        says=("AssertionError: still reported",),
    ),
    "output_that_is_no_text": Fault(
        body=r"os.write(1, b'\xff\xfe raw \n')" + "\n    assert 0", says=(r"\\xff\\xfe raw",)
    ),
    "strange_property": Fault(
        body="record_property('odd', object())", arguments="record_property", outcome="passed"
    ),
    "getpid_replaced": Fault(
        arguments="monkeypatch",
        body="monkeypatch.setattr(os, 'getpid', lambda: 1234)\n    dist.barrier()",
        outcome="passed",
    ),
    "child_left_behind": Fault(
        body="subprocess.Popen(['sleep', '4242'])",
        decorators="@pytest.mark.filterwarnings('ignore')",
        outcome="passed",
    ),
}

# What one rank does in a fixture, and what the user reads of it.
ENDINGS = {
    "sys_exit": ("sys.exit(4)", ("SystemExit: 4", "rank 1 failed")),
    "sigkill": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        (r"rank 1 was killed by signal 9 \(SIGKILL\) during {phase}",),
    ),
    "group_destroyed": (
        "dist.destroy_process_group(); dist.barrier()",
        ("rank 1 failed", "Default process group has not been initialized"),
    ),
}
for ending, (statements, says) in ENDINGS.items():
    for phase, before in (("setup", ""), ("teardown", "    yield\n")):
        name = f"{ending}_in_{phase}"
        FAULTS[name] = Fault(
            before=f"@pytest.fixture\ndef {name}():\n{before}    if rank() == 1: {statements}\n",
            arguments=name,
            body="pass",
            outcome="error",
            says=tuple(pattern.replace("{phase}", phase) for pattern in says),
        )


def source():
    parts = [PRELUDE]
    for name, fault in FAULTS.items():
        parts.append(
            f"{fault.before}\n{fault.decorators}\n"
            "@pytest.mark.distributed(world_size=3, "
            f"timeout_s={extend_under_load(fault.timeout_s)})\n"
            f"def test_{name}({fault.arguments}):\n    {fault.body}\n\n"
            f"@pytest.mark.distributed(world_size=2)\n"
            f"def test_after_{name}():\n"
            f"    dist.all_reduce(torch.ones(1))\n"
        )
    return "\n".join(parts)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    """The report of one session with all faults: outcomes and texts by test."""
    path = tmp_path_factory.mktemp("faults")
    (path / "test_faulty.py").write_text(source())
    (path / "pytest.ini").write_text("[pytest]\n")
    session = start(path, "-v", "-rA", "test_faulty.py")
    output, _ = session.communicate(timeout=extend_under_load(300))
    return Session(output, path)


class Session:
    def __init__(self, text, path):
        self.text = text
        self.path = path

    def outcomes(self, name):
        pattern = rf"^test_faulty.py::{name} (?:<- \S+ )?([A-Z]+)"
        return [found.lower() for found in re.findall(pattern, self.text, re.MULTILINE)]

    def story(self, name):
        return "\n".join(stories(self.text, name))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_has_its_outcome_and_explanation(session, name):
    fault = FAULTS[name]
    assert fault.outcome in session.outcomes(f"test_{name}"), session.outcomes(f"test_{name}")
    story = session.story(f"test_{name}")
    for pattern in fault.says:
        assert re.search(pattern, story), f"{pattern!r} is not in\n{story[:3000]}"
    assert not re.search(r"^-+ Captured .*\) \(rank", story, re.MULTILINE), "ranks named twice"
    # Only the interpreter's own dump of a crash may show the plugin's frames.
    assert "pytest_fsdp_comm/" not in story.partition("Fatal Python error")[0]
    assert "INTERNALERROR" not in session.text


def test_the_summary_has_the_reason_once(session):
    for line in (
        "XFAIL test_faulty.py::test_xfail - known",
        r"SKIPPED \[1\] test_faulty.py:\d+: not today",
    ):
        assert re.search(rf"^{line}$", session.text, re.MULTILINE)


@pytest.mark.parametrize("name", FAULTS)
def test_the_next_test_passes(session, name):
    assert session.outcomes(f"test_after_{name}") == ["passed"]


def test_nothing_is_left(session):
    assert not [entry for entry in session.path.iterdir() if entry.name.startswith("fsdp-comm")]
    running = command_lines()
    assert not [line for line in running if "4242" in line or str(session.path) in line]
