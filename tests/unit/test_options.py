"""Settings from marker, command line and ini file, and errors about wrong values."""

from pathlib import Path

import pytest

from pytest_fsdp_comm.launch_environment import LaunchedRank
from pytest_fsdp_comm.marker import add_ranks, resolve, world_sizes
from pytest_fsdp_comm.options import (
    BadValueError,
    DistributedSettings,
    SessionOptions,
    describe,
    join_paths,
    read_session_options,
)
from pytest_fsdp_comm.ranks.rank import gpus as gpus_module


def session_options(**changes):
    values = {
        "world_size": 2,
        "backend": None,
        "timeout_s": 120.0,
        "snapshot_dir": Path("/snapshots"),
    }
    return SessionOptions(**{**values, **changes})


def settle(*args, options=None, gpus=0, parametrized=None, **kwargs):
    mark = pytest.mark.distributed(*args, **kwargs).mark
    options = options or session_options()
    return resolve(mark, options, parametrized=parametrized, count_gpus=lambda: gpus)


def problem(*args, **kwargs):
    with pytest.raises(ValueError, match=r".") as caught:
        settle(*args, **kwargs)
    return str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "joined"),
    [
        ("--comm-report out -x --comm-summary s.md", "--comm-report=out -x --comm-summary=s.md"),
        (
            "--comm-artifacts=out --comm-timeout 3 tests",
            "--comm-artifacts=out --comm-timeout 3 tests",
        ),
        # pytest reports the missing value.
        ("tests --comm-report", "tests --comm-report"),
    ],
)
def test_paths_are_joined_to_their_options(arguments, joined):
    assert join_paths(arguments.split()) == joined.split()


def test_two_gloo_ranks_are_the_default():
    assert settle() == DistributedSettings(
        world_size=2,
        backend="gloo",
        ranks=(0, 1),
        scope="test",
        timeout_s=120.0,
        device=None,
    )


def test_marker_overrides_the_option():
    options = session_options(world_size=8, backend="fake", timeout_s=5.0)
    settings = settle(4, backend="gloo", timeout_s=7, options=options)
    assert (settings.world_size, settings.backend, settings.timeout_s) == (4, "gloo", 7.0)
    inherited = settle(options=options)
    assert (inherited.world_size, inherited.backend, inherited.timeout_s) == (8, "fake", 5.0)


def test_list_of_world_sizes_parametrizes():
    def sizes(*args, **kwargs):
        return world_sizes(pytest.mark.distributed(*args, **kwargs).mark)

    assert sizes([2, 4]) == (2, 4)
    assert sizes(world_size=(3,)) == (3,)
    assert sizes(4) is None
    assert settle(4) == settle(world_size=4)
    assert settle([2, 4], parametrized=4).world_size == 4


@pytest.mark.parametrize(
    ("gpus", "device", "backend"),
    [(0, None, "gloo"), (1, None, "gloo"), (2, None, "nccl"), (2, "cpu", "gloo")],
)
def test_default_backend_follows_the_visible_gpus(gpus, device, backend):
    assert settle(2, gpus=gpus, device=device).backend == backend


def test_gpus_are_counted_only_if_needed():
    def count():
        pytest.fail("asked for the GPUs")

    mark = pytest.mark.distributed(backend="gloo").mark
    assert resolve(mark, session_options(), parametrized=None, count_gpus=count).backend == "gloo"


def test_fake_backend_runs_rank_0_by_default():
    assert settle(4096, backend="fake").ranks == (0,)
    assert settle(4096, backend="fake", ranks=[4095, 0, 0]).ranks == (0, 4095)
    assert settle(4, backend="fake", ranks="all").ranks == (0, 1, 2, 3)
    assert settle(4, ranks="all") == settle(4)


def test_further_ranks_include_real_coordinates():
    settings = settle(16, simulate=True, real={"pp": 2})
    assert settings.adds_distinct_ranks
    assert not settle(16, simulate=True, ranks=[0]).adds_distinct_ranks
    joined = add_ranks(settings, [3], session_options(rank_slots=4))
    assert (joined.ranks, joined.adds_distinct_ranks) == ((0, 3, 8, 11), False)
    with pytest.raises(BadValueError, match="allows only 3 at a time"):
        add_ranks(settings, [3], session_options(rank_slots=3))


@pytest.mark.parametrize(
    ("simulate", "expected"),
    [(True, "answering"), ("strict", "strict"), (64, "answering"), (65, ""), (False, "")],
)
def test_simulate_accepts_true_or_a_world_size(simulate, expected):
    settings = settle(64, simulate=simulate)
    assert settings.simulation == expected
    assert (settings.backend, settings.ranks) == (
        ("fake", (0,)) if expected else ("gloo", tuple(range(64)))
    )


@pytest.mark.parametrize(
    ("splits", "expected"), [(None, None), ("even", ()), ([3, 1], (3.0, 1.0)), ((0.5, 0), (0.5, 0))]
)
def test_shares_of_experts_are_declared(splits, expected):
    assert settle(64, simulate=True, simulation_splits=splits).simulation_splits == expected


def test_real_axes_run_every_coordinate():
    settings = settle(16, simulate=True, real={"pp": 2, "ep": 2})
    assert [(axis.name, axis.stride) for axis in settings.real] == [("pp", 8), ("ep", 4)]
    assert settings.ranks == (0, 4, 8, 12)
    assert settle(16, simulate=True, real={"ep": (2, 1)}, ranks=[6]).ranks == (6, 7)
    assert settle(16, simulate=17, real={"pp": 2}).ranks == tuple(range(16))


@pytest.mark.parametrize("value", [0, -1, "four", 10**6, 2.5, True, "", "1e3"])
def test_bad_world_size_is_refused(value):
    assert problem(value) == (
        "world_size: expected a whole number of ranks from 1 to 256 (to 131072 with the fake "
        f"backend), got {value!r}"
    )


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ([], {"colour": 4}, ("unknown argument 'colour'; expected one of world_size, backend, "
         "simulate, simulation_splits, real, ranks, scope, timeout_s, device")),
        ([4, "gloo"], {}, ("takes one positional argument (world_size), got 2: 4, 'gloo'; write "
         "distributed(world_size=None, *, backend=None, simulate=False, simulation_splits=None, "
         "real=None, ranks=None, scope='test', timeout_s=None, device=None)")),
        ([4], {"world_size": 4}, "world_size is set twice, by position and by name"),
        ([[]], {}, "world_size: expected at least one world size, such as [2, 4], got []"),
        (["4"], {}, "world_size: expected a number, got the text '4'"),
        ([[2, "4"]], {}, "world_size: expected a number, got the text '4'"),
        ([], {"timeout_s": "30"}, "timeout_s: expected a number, got the text '30'"),
        ([], {"simulate": "64"}, "simulate: expected a number, got the text '64'"),
        ([[2, 2]], {}, "world_size: [2, 2] lists a world size twice"),
        ([[2, 0]], {}, ("world_size: expected a whole number of ranks from 1 to 256 (to 131072 "
         "with the fake backend), got 0")),
        ([512], {}, ("512 ranks are too many processes for one machine (at most 256); simulate "
         "them in one process with backend='fake' or --comm-backend fake")),
        ([], {"backend": "mpi"}, "backend: expected one of 'gloo', 'nccl', 'fake', got 'mpi'"),
        ([], {"scope": "session"}, "scope: expected one of 'test', 'module', got 'session'"),
        ([], {"device": "tpu"}, "device: expected one of 'cpu', 'cuda', got 'tpu'"),
        ([], {"timeout_s": 0}, "timeout_s: expected a positive number of seconds, got 0"),
        ([], {"timeout_s": "soon"}, ("timeout_s: expected a positive number of seconds, got "
         "'soon'")),
        ([], {"timeout_s": float("inf")}, ("timeout_s: expected a positive number of seconds, got "
         "inf")),
        ([], {"ranks": [0]}, ("ranks: selects simulated ranks, so it requires backend='fake'; "
         "with 'gloo', all ranks run")),
        ([4], {"backend": "fake", "ranks": [4]}, ("ranks: expected whole numbers from 0 to 3, got "
         "4")),
        ([4], {"backend": "fake", "ranks": []}, ("ranks: expected 'all' or a list such as [0, 3], "
         "got []")),
        ([], {"simulate": 0}, ("simulate: expected True, False, 'strict' or a world size of at "
         "least 1, got 0")),
        ([], {"simulate": "loose"}, ("simulate: expected True, False, 'strict' or a world size of "
         "at least 1, got 'loose'")),
        ([], {"simulate": True, "simulation_splits": [1, -1]}, ("simulation_splits: expected "
         "'even', or each expert's share as a list such as [4, 2, 1, 1], got [1, -1]")),
        ([], {"simulate": True, "simulation_splits": [0]}, ("simulation_splits: expected "
         "'even', or each expert's share as a list such as [4, 2, 1, 1], got [0]")),
        ([], {"simulation_splits": "even"}, ("simulation_splits: applies only to "
         "simulations; set simulate= or drop it")),
        ([], {"simulate": True, "backend": "gloo"}, ("backend='gloo' conflicts with "
         "simulate=True, because a simulation sends nothing; drop one of them")),
        ([], {"real": {"pp": 2}}, ("real: applies only to simulations; set simulate= or "
         "drop it")),
        ([], {"real": {"pp": 1}}, ("real: expected each axis with its size, at least 2, such "
         "as {'pp': 4}, or with its size and stride, such as {'ep': (8, 1)}, got {'pp': 1}")),
        ([6], {"simulate": True, "real": {"pp": 4}}, ("real: an axis 'pp' of size 4 and stride 1 "
         "does not divide 6 ranks")),
        ([8], {"simulate": True, "real": {"pp": 4, "ep": (4, 1)}}, ("real: the axes pp, ep "
         "overlap: write the size and the mesh stride of each, such as {'ep': (8, 1)}")),
        ([1024], {"simulate": True, "real": {"pp": 512}}, ("512 ranks are too many processes "
         "for one machine (at most 256); name some of them, ranks=[0, 3]")),
        ([], {"backend": "fake", "device": "cuda"}, ("device='cuda' is set, but ranks of "
         "backend='fake' run on the CPU; simulate a GPU with simulate=, drop device=, or run the "
         "test on GPUs with backend='nccl'")),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_with_a_remedy(args, kwargs, text):
    assert problem(*args, **kwargs) == text


@pytest.mark.parametrize("backend", [None, "gloo", "fake"])
def test_device_cuda_is_accepted_with_any_backend(backend):
    assert settle(device="cuda", options=session_options(backend=backend)).device == "cuda"


@pytest.mark.parametrize("gpus", [0, 2])
def test_session_backend_nccl_needs_no_gpus(gpus):
    # Without GPUs, each test fails on its ranks.
    assert settle(options=session_options(backend="nccl"), gpus=gpus).backend == "nccl"


def test_more_ranks_than_slots_are_refused():
    options = session_options(rank_slots=3)
    assert settle(3, options=options).world_size == 3
    assert settle(4096, backend="fake", ranks=[0, 1, 2], options=options).world_size == 4096
    assert problem(4, options=options) == (
        "the test needs 4 ranks, but --rank-slots (ini fsdp_comm_rank_slots) allows only 3 at a "
        "time; raise it to at least 4, lower the world size, or simulate the ranks in one process "
        "with backend='fake'"
    )


def test_header_names_the_session_defaults():
    default = (
        "fsdp-comm: world size 2 unless a test sets one, backend nccl with enough GPUs, else gloo"
    )
    assert describe(session_options()) == default
    assert describe(session_options(world_size=4, backend="fake")) == (
        "fsdp-comm: world size 4 unless a test sets one, backend fake"
    )
    assert describe(session_options(start="spawn")).endswith("gloo, ranks are new processes")
    assert describe(session_options(rank_slots=8)) == f"{default}, at most 8 ranks at once"


def launched(**changes):
    values = {
        "rank": 0,
        "world_size": 512,
        "local_rank": 0,
        "local_world_size": 8,
        "host": "host0",
        "port": 1,
        "has_store": True,
        "run_id": "run",
        "launcher": "torchrun",
    }
    values |= {"is_leader": values["rank"] == 0}
    return LaunchedRank(**{**values, **changes})


def test_launched_ranks_may_exceed_one_machine():
    options = session_options(world_size=512, launched=launched())
    assert settle(options=options).world_size == 512
    assert "512 ranks are too many" in problem(512)
    # Tests of another size are skipped later; a wrong argument is still an error.
    assert "300 ranks are too many" in problem(300, options=options)
    assert describe(options).endswith(", rank 0 of 512 started by torchrun")


def test_launched_ranks_have_the_gpus_of_all_machines(monkeypatch):
    monkeypatch.setattr(gpus_module, "count_visible_gpus", lambda: 8)
    assert gpus_module.count_usable_gpus(None) == 8
    assert gpus_module.count_usable_gpus(launched()) == 512
    assert gpus_module.count_usable_gpus(launched(local_world_size=16)) == 0


@pytest.mark.parametrize(("arguments", "size"), [((), 6), (("--world-size", "3"), 3)])
def test_launched_world_size_overrides_ini(pytester, monkeypatch, arguments, size):
    for name, value in {"RANK": "1", "WORLD_SIZE": "6"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "host0")
    monkeypatch.setenv("MASTER_PORT", "1")
    pytester.makeini("[pytest]\nfsdp_comm_world_size = 4")
    assert read_session_options(pytester.parseconfig(*arguments)).world_size == size


def test_help_of_ini_deadline_names_seconds(pytester):
    help_text = " ".join(pytester.runpytest_subprocess("--help").stdout.str().split())
    assert "fsdp_comm_timeout_s (string): default for --comm-timeout, in seconds" in help_text


@pytest.mark.parametrize(
    ("option", "written", "other"),
    [
        # `tests/expected` is the snapshot directory, and `link` leads to it.
        ("--comm-artifacts=tests", "tests/expected", "the snapshot directory tests/expected"),
        ("--comm-artifacts=linked", "linked/received", "the snapshot directory tests/expected"),
        ("--comm-artifacts=link", "link/received", "the snapshot directory tests/expected"),
        ("--comm-artifacts=tests/../tests", "tests/expected", "the snapshot directory"),
        ("--comm-artifacts=__snapshots__", "__snapshots__/received", "of plain snapshots"),
        ("--comm-report=tests/expected", "tests/expected/index.html", "the snapshot directory"),
        # The pages of tests are written to `tests`.
        ("--comm-report=.", "tests", "the snapshot directory tests/expected"),
        ("--comm-summary=tests/expected/a.comm", "tests/expected/a.comm", "the snapshot directory"),
        ("--comm-summary=__snapshots__/test_a.ambr", "__snapshots__/test_a.ambr", "of plain snaps"),
        ("--comm-summary=a.md", "a.md", "the snapshot directory tests/expected"),
    ],
)
def test_output_over_snapshots_is_refused(pytester, option, written, other):
    make_outputs(pytester)
    with pytest.raises(pytest.UsageError) as caught:
        read_session_options(pytester.parseconfig(*option.split("=", 1)))
    name = option.partition("=")[0]
    text = str(caught.value)
    assert text.startswith(f"{name}: this option writes {written}, which overlaps with ")
    assert other in text
    assert text.endswith("so reviewed snapshots could be lost; choose a different path")
    assert "\n" not in text


@pytest.mark.parametrize(
    "arguments",
    [
        ["--comm-artifacts=."],
        ["--comm-artifacts=tests/expected-by-ci"],
        ["--comm-artifacts=expected"],
        ["--comm-report=tests"],
        ["--comm-report=report", "--comm-summary=report/summary.md"],
        ["--comm-summary=tests/expected.md"],
        ["--comm-summary=tests"],  # a directory, which no file replaces
    ],
)
def test_output_beside_snapshots_is_accepted(pytester, arguments):
    make_outputs(pytester)
    options = read_session_options(pytester.parseconfig(*arguments))
    assert options.snapshot_dir == pytester.path / "tests/expected"


def make_outputs(pytester):
    pytester.makeini("[pytest]\nfsdp_comm_snapshot_dir = tests/expected")
    snapshots = pytester.path / "tests/expected"
    snapshots.mkdir(parents=True)
    (snapshots / "b.comm").write_text("reviewed")
    (pytester.path / "link").symlink_to(snapshots)
    (pytester.path / "linked").mkdir()
    (pytester.path / "linked/received").symlink_to(snapshots)
    (pytester.path / "a.md").symlink_to(snapshots / "b.comm")
