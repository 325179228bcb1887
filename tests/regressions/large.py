"""Writes changes of 126 layers, to measure how long it takes to explain them.

``python tests/regressions/large.py DIR`` takes a minute or two, and leaves the files that
`test_table.py` leaves of a case.
"""

import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from regressions.table import Case, both_sides, mesh, record, write
from regressions.tensor_parallel import sharded, step

from pytest_fsdp_comm.recording.comm_mode import CommMode

LAYERS = 126


def side(layers=LAYERS, *, recomputes=False, batch=2, micro_batches=1):
    """As many layers, of nine modules with rows of their own, over 8 by 4 ranks."""

    def build(_changed):
        decoder = {"reentrant": False if recomputes else None}
        model = sharded(layers, axes=mesh(dp=8, tp=4), decoder=decoder)

        def run():
            for _ in range(micro_batches):
                step(model, batch=batch)

        return model, run

    case = Case(name="large", build=build, is_regression=False, worlds=(32, 32))
    return record(case, CommMode(trace_operations=False), changed=True)


def noisy(given, share):
    """A side in which that share of rows is gone or has other counts, sizes or dtypes."""
    draw = random.Random(7)  # noqa: S311  # noise, no secret
    rows = []
    for row in given.comm.rows:
        first, *rest = row.calls
        edits = (
            (),
            (replace(first, count=first.count + draw.randint(1, 3)),),
            (replace(first, nbytes=first.nbytes * draw.choice((3, 5, 7)) // 2),),
            (replace(first, dtype="bfloat16"),),
        )
        if draw.random() >= share:
            rows.append(row)
        elif edit := draw.choice(edits):
            rows.append(replace(row, calls=tuple(sorted((*edit, *rest)))))
    return replace(given, comm=replace(given.comm, rows=tuple(rows)))


def main(directory):
    torch.set_num_threads(1)
    reviewed, more = side(), side(LAYERS + 2)
    changes = {
        "two_layers_more": more,
        "checkpointing": side(recomputes=True),
        "batch_and_micro_batches_doubled": side(batch=4, micro_batches=2),
        "one_layer_more_checkpointing_and_batch_doubled": side(
            LAYERS + 1, recomputes=True, batch=4
        ),
        "noise_in_1_percent": noisy(reviewed, 0.01),
        "noise_in_10_percent": noisy(reviewed, 0.1),
        "two_layers_more_and_noise_in_1_percent": noisy(more, 0.01),
    }
    for name, changed in changes.items():
        write(Path(directory) / name, both_sides(reviewed, changed))


if __name__ == "__main__":
    main(sys.argv[1])
