"""What a simulated rank is told stands in the snapshot, and is compared."""

import dataclasses

import pytest
from texts import parse_comm

from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Answer, Recording
from pytest_fsdp_comm.comm.json import dump_recordings, load_recordings
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.errors import SnapshotFormatError
from pytest_fsdp_comm.snapshots.comm_text import format_profile

ONE = Answer(site="train:step", how="item", value="1.0", call_site="train.py:3")
TRUTH = dataclasses.replace(ONE, value="False")
MASK = Answer(site="model:Block.<locals>.a b", how="equal", value="False")
SOURCE = """
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

class Logging(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        self.logged = y.mean().item()
        return y

@pytest.mark.distributed(world_size=64, simulate=True)
def test_step(device_mesh, comm_mode, comm_snapshot):
    model = fully_shard(Logging(8, 64), mesh=device_mesh())
    with comm_mode(model):
        loss = model(torch.randn(2, 8)).sum()
        loss.backward()
        SPARE = 0
    assert comm_mode == comm_snapshot
"""
LINE = "answered 1.0 to test_it:Logging.forward (item)"


@pytest.fixture
def run(pytester):
    def run(source, *arguments):
        (pytester.path / "test_it.py").write_text(source)
        return pytester.runpytest_subprocess(
            "-p", "no:cacheprovider", "-p", "no:randomly", *arguments
        )

    return run


def profile(*answers, rank=0):
    recording = Recording(
        rank=rank, world_size=2, backend="fake", torch_version="2", answers=tuple(sorted(answers))
    )
    return fold(recording)


def test_answers_are_merged_and_written_to_json():
    (recording,) = load_recordings(
        dump_recordings(
            [Recording(rank=0, world_size=2, backend="", torch_version="2", answers=(ONE,))]
        )
    )
    assert recording.answers == (ONE,)
    assert recording.answers[0].call_site == "train.py:3"
    both = merge([profile(ONE), profile(ONE, MASK, rank=1)])
    assert both.answers == (MASK, ONE)


def test_answer_text_is_parsed_again():
    written = format_profile(profile(ONE, TRUTH, MASK))
    assert written.splitlines()[3:-1] == [
        "answered False to model:Block.<locals>.a\\x20b (equal)",
        "answered 1.0 to train:step (item)",
        "answered False to train:step (item)",
    ]
    assert parse_comm(written) == profile(ONE, TRUTH, MASK)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" (item)", ""),
        ("answered 1.0", "answered 1 .0"),
        ("False to train:step", "1.0 to train:step"),  # twice
        ("1.0 to train:step", "2.0 to train:z"),  # in another order
    ],
)
def test_broken_answers_are_refused(old, new):
    text = format_profile(profile(ONE, TRUTH))
    assert old in text
    with pytest.raises(SnapshotFormatError, match=r"^f\.comm, line [45]: it reads 'answered "):
        parse_comm(text.replace(old, new, 1), where="f.comm")


def test_added_removed_or_changed_answer_differs():
    def told(old, new):
        changes = compare(profile(*old), profile(*new)).changes
        return [(change.what, change.old_text, change.new_text) for change in changes]

    moved = dataclasses.replace(ONE, call_site="train.py:99")
    assert told([ONE, MASK], [moved, MASK]) == []
    assert told([ONE], []) == [("assumed value in train:step (item)", "1.0", "none")]
    assert told([ONE, MASK], [ONE, TRUTH, MASK]) == [
        ("assumed value in train:step (item)", "1.0", "1.0, False")
    ]


def test_added_or_removed_answer_fails_the_comparison(pytester, run):
    run(SOURCE, "--snapshot-update").assert_outcomes(passed=1)
    file = pytester.path / "snapshots/test_it/test_step.ws64.comm"
    assert file.read_text().splitlines()[4:6] == ["overlap known", LINE]
    # Lines may move.
    run("# moved\n" + SOURCE).assert_outcomes(passed=1)
    new = run(SOURCE.replace("SPARE = 0", "print(loss.item())"))
    new.assert_outcomes(failed=1)
    new.stdout.fnmatch_lines(["*assumed value in test_it:test_step (item): now 1.0*"])
    # Notes say where the new value was read; the reviewed one needs no note.
    notes = [line for line in new.stdout.lines if "received the assumed value" in line]
    assert len(notes) == 1
    assert "note: test_it.py:" in notes[0]
    lost = run(SOURCE.replace("y.mean().item()", "0"))
    lost.assert_outcomes(failed=1)
    lost.stdout.fnmatch_lines(["*assumed value in test_it:Logging.forward (item): 1.0 -> none*"])
    strict = run(SOURCE.replace("simulate=True", 'simulate="strict"'))
    strict.assert_outcomes(failed=1)
    strict.stdout.fnmatch_lines(["*test_it.py:10 reads tensor values (item)*"])
    # From the test to the line, and nothing of torch's or of what simulates it.
    text = strict.stdout.str()
    strict.stdout.fnmatch_lines([">       self.logged = y.mean().item()"])
    assert "/torch/" not in text
    assert "During handling" not in text
    assert "simulation/" not in text


SHARED = """
import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.distributed(world_size=4, simulate=True, scope="module")

@pytest.fixture(scope="module", params=["name", "memory"])
def asking(request):
    ask = torch.cuda.get_device_name if request.param == "name" else torch.cuda.mem_get_info
    return ask()

def total():
    count = torch.tensor([3])
    dist.all_reduce(count)
    return count.item()

def recorded(comm_mode, comm_snapshot):
    with comm_mode:
        dist.barrier()
    assert comm_mode == comm_snapshot

def test_asks_itself(comm_mode, comm_snapshot):
    assert torch.cuda.memory_allocated() == 0
    assert total() == 12
    recorded(comm_mode, comm_snapshot)

def test_uses_the_fixture(asking, comm_mode, comm_snapshot):
    recorded(comm_mode, comm_snapshot)

def test_uses_the_fixture_too(asking, comm_mode, comm_snapshot):
    recorded(comm_mode, comm_snapshot)

def test_asks_nothing(comm_mode, comm_snapshot):
    recorded(comm_mode, comm_snapshot)
"""


def test_snapshot_has_answers_of_test_and_fixtures(pytester, run):
    run(SHARED, "--snapshot-update").assert_outcomes(passed=6)
    answered = {
        path.name.removeprefix("test_").partition(".")[0]: [
            line.split()[1] for line in path.read_text().splitlines() if "answered" in line
        ]
        for path in (pytester.path / "snapshots/test_it").iterdir()
    }
    memory = f"({80 * 2**30},{80 * 2**30})"
    assert answered == {
        "asks_itself": ["0", "mirrored"],
        "uses_the_fixture[memory]": [memory],
        "uses_the_fixture[name]": ["NVIDIAH10080GBHBM3"],
        "uses_the_fixture_too[memory]": [memory],
        "uses_the_fixture_too[name]": ["NVIDIAH10080GBHBM3"],
        "asks_nothing": [],
    }
    head, *tests = SHARED.split("def test_")
    backwards = head + "".join(f"def test_{one}\n\n" for one in reversed(tests))
    run(backwards).assert_outcomes(passed=6)
    run(SHARED, "-n", "2", "--dist", "load").assert_outcomes(passed=6)
    run(SHARED, "test_it.py::test_uses_the_fixture_too[memory]").assert_outcomes(passed=1)
