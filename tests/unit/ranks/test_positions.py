"""Where a rank is, read by a thread of its own: user code, and what it waits in there."""

import ast
import contextlib
import subprocess
import sys
import threading
import time
from traceback import FrameSummary
from types import SimpleNamespace

from torch.distributed import FileStore

from pytest_fsdp_comm.gathering import Exchange, TextStore
from pytest_fsdp_comm.ranks.hangs.position import _make_stack, is_waiting, read_position
from pytest_fsdp_comm.ranks.hangs.stacks import drop_start_frames, show_stack
from pytest_fsdp_comm.ranks.rank import main
from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.ranks.wire.results import Activity

# Everything that moves frames: calls, generators, exceptions, recursion and collections. Where
# faulthandler walks the frames of such a thread from another one, processes crash now and then.
BUSY = """
import _thread, gc, sys
from pytest_fsdp_comm.ranks.hangs.position import read_position

def generate(count):
    for number in range(count):
        try:
            yield number
        finally:
            number += 1

def recurse(depth):
    if depth:
        return recurse(depth - 1)
    raise KeyError(depth)

def read_all():
    for _ in range({reads}):
        read_position(0, with_groups=False)
    has_read.append(True)

sys.setswitchinterval(1e-5)
has_read = []
_thread.start_new_thread(read_all, ())
while not has_read:
    try:
        sum(generate(10))
        (lambda: recurse(10))()
    except KeyError:
        pass
    gc.collect(0)
print("read", len(has_read))
"""


def test_read_position_with_busy_thread_never_crashes():
    code = BUSY.format(reads=5000)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=extend_under_load(100),
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "read 1\n"), done.stderr


def read_during(block, *, read_it=lambda: read_position(0, with_groups=False)):
    """The position of this thread while it runs a block, which is given an event to end by."""
    found = []
    event = threading.Event()

    def read():
        while read_position(0, with_groups=False).site.endswith(" in read_during"):
            time.sleep(0.01)
        time.sleep(extend_under_load(0.1))  # the block reaches its wait
        found.append(read_it())
        event.set()

    reader = threading.Thread(target=read)
    reader.start()
    block(event)
    reader.join()
    return found[0]


def waits_for_torch():
    frame, stack = sys._current_frames()[threading.main_thread().ident], []
    while frame is not None:
        stack.append(frame)
        frame = frame.f_back
    return is_waiting(_make_stack(stack))


def test_a_position_names_what_the_user_called():
    def wait_for_the_event(event):
        event.wait(1000)

    position = read_during(wait_for_the_event)
    assert "test_positions.py" in position.site
    assert position.code == "event.wait(1000)"
    assert position.stack[0] == f"{position.site}: event.wait(1000)"
    assert position.stack[-1].startswith("inside wait (")
    assert position.activity is Activity.RUNS

    def wait_for_the_lock(event):
        lock = threading.Lock()
        lock.acquire()
        threading.Thread(target=lambda: event.wait(1000) and lock.release()).start()
        lock.acquire()

    position = read_during(wait_for_the_lock)
    assert position.code == "lock.acquire()"
    # Nothing that torch started: a collective in the background is not what it waits in.
    assert not read_during(wait_for_the_lock, read_it=waits_for_torch)


def test_is_waiting_detects_waits_in_torch():
    class Work:
        def __init__(self, event):
            self.wait = event.wait

    def wait(event):
        work = Work(event)
        work.wait(1000)

    assert read_during(wait).code == "work.wait(1000)"
    assert read_during(wait, read_it=waits_for_torch)

    def work_on(event):
        while not event.is_set():
            sum(range(1000))

    assert not read_during(work_on, read_it=waits_for_torch)


def test_position_during_report_is_where_it_raised():
    class Call:
        excinfo = None

    def fail():
        raise LookupError("here")

    def pytest_runtest_makereport(call, event):
        event.wait(1000)
        return call

    call = Call()
    with contextlib.suppress(LookupError):
        try:
            fail()
        except LookupError as error:
            call.excinfo = type("Info", (), {"value": error})
            raise
    position = read_during(lambda event: pytest_runtest_makereport(call, event))
    assert position.activity is Activity.REPORTS
    assert position.site.endswith(" in fail")
    assert position.is_reporting
    passed = read_during(lambda event: pytest_runtest_makereport(Call(), event))
    assert passed.activity is Activity.RUNS
    assert not passed.is_reporting


def test_rank_that_explains_a_comparison_is_reporting():
    def pytest_assertrepr_compare(event):
        event.wait(1000)

    assert read_during(pytest_assertrepr_compare).is_reporting


def test_rank_that_saves_coverage_is_reporting():
    def save_coverage(event):
        event.wait(5)

    assert read_during(save_coverage).is_reporting


def test_rank_that_tells_the_others_is_reporting():
    def tell(event):
        TextStore(SimpleNamespace(set=lambda *_: event.wait(1000))).put("name", "text")

    assert read_during(tell).is_reporting


def test_rank_sharing_a_comparison_is_not_reporting(tmp_path):
    store = TextStore(FileStore(str(tmp_path / "store"), -1))
    ends = [Exchange(store, rank, range(2)) for rank in (0, 1)]

    def pytest_assertrepr_compare(event):
        late = threading.Thread(target=lambda: event.wait(1000) and ends[1].share("name"))
        late.start()
        ends[0].share("name")
        late.join()

    assert not read_during(pytest_assertrepr_compare).is_reporting


def frame(path, name="f"):
    return FrameSummary(path, 1, name, line="g()" if path.startswith("/me") else "")


def test_show_stack_shortens_deep_user_stacks():
    users = [frame("/me/m.py", f"f{n}") for n in range(100)]
    library, own = ast.__file__, "/v/lib/python3.11/site-packages/_pytest/runner.py"
    assert show_stack([frame(library, "parse"), *users, frame(own)]) == (
        "/me/m.py:1 in f0: g()",
        "/me/m.py:1 in f1",
        "/me/m.py:1 in f2",
        "/me/m.py:1 in f3",
        "... 95 more calls ...",
        "/me/m.py:1 in f99",
        f"inside parse ({library}:1)",
    )
    assert len(show_stack(users[:6])) == 6
    assert show_stack([frame(library, "parse"), frame(own)]) == (f"inside parse ({library}:1)",)
    assert show_stack([]) == ()
    # Who calls pytest.main() is no code of the test.
    entry, program = frame(main.__file__), frame("/me/program.py")
    assert drop_start_frames([*users, frame(own), entry, program]) == [*users, frame(own)]
