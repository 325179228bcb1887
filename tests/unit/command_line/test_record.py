"""Arguments that ``fsdp-comm record`` rejects before it runs the script."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--step", "x", "train.py"], "--step: expected a step, such as 3 or 3-4, got 'x'"),
        (["--out", "x.txt", "train.py"], "--out: expected the name of a .comm file, got 'x.txt'"),
        ([], "expected a script to run: fsdp-comm record [--step 3] train.py ..."),
        (["gone.py"], "there is no file gone.py; use -m to run a module"),
        (
            ["--world-size", "8", "--nproc", "2", "train.py"],
            "expected --nproc for real ranks or --world-size for a simulated one, got both",
        ),
        (["--world-size", "0", "train.py"], "--world-size: expected 1 to 131072, got 0"),
        (
            ["--rank", "3", "train.py"],
            "--rank: expected --world-size, too: only a simulation records one rank",
        ),
        (
            ["--local-world-size", "1", "train.py"],
            "--local-world-size: expected --world-size, too: only a simulation records one rank",
        ),
        (
            ["--world-size", "8", "--rank", "8", "train.py"],
            "--rank: expected 0 to 7 with --world-size 8, got 8",
        ),
        (
            ["--world-size", "8", "--local-world-size", "9", "train.py"],
            "--local-world-size: expected 1 to 8 with --world-size 8, got 9",
        ),
    ],
)
def test_record_rejects_wrong_arguments(write, fsdp_comm, arguments, text):
    write("train.py", "raise SystemExit('it ran')")
    done = fsdp_comm("record", *arguments)
    assert (done.status, done.out, done.err) == (2, "", f"fsdp-comm: {text}\n")
