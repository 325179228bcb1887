"""What ``fsdp-comm record`` refuses before it runs anything."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--step", "x", "train.py"], "--step: expected a step, such as 3, or 3-4, got 'x'"),
        (["--out", "x.txt", "train.py"], "--out: expected the name of a .comm file, got 'x.txt'"),
        ([], "expected a script to run: fsdp-comm record [--step 3] train.py ..."),
        (["gone.py"], "there is no file gone.py; -m takes the name of a module"),
        (
            ["--world-size", "8", "train.py"],
            "expected --world-size and --backend fake together, for one simulated rank; real ranks "
            "are started by --nproc 4, or torchrun --nproc-per-node 4 -m pytest_fsdp_comm record",
        ),
        (
            ["--world-size", "8", "--backend", "fake", "--rank", "8", "train.py"],
            "--rank: expected one from 0 to 7, got 8",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_errors_that_say_what_would(
    write, fsdp_comm, arguments, text
):
    write("train.py", "raise SystemExit('it ran')")
    done = fsdp_comm("record", *arguments)
    assert (done.status, done.out, done.err) == (2, "", f"fsdp-comm: {text}\n")
