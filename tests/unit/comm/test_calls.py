"""A field of a call is declared once."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest_fsdp_comm

DECLARATION = (
    "    weight: int = _make_word_field(\n"
    '        0, "weighs {}", lambda event: len(event.op), value_pattern=_COUNT\n'
    "    )\n"
)
SCRIPT = """
import json
from dataclasses import replace
from pytest_fsdp_comm.comm.diff import compare
from pytest_fsdp_comm.comm.events import Collective, Phase, Recording, Source
from pytest_fsdp_comm.comm.mesh import MeshAxis
from pytest_fsdp_comm.comm.profile import fold, merge
from pytest_fsdp_comm.reports.changes import render_comparison
from pytest_fsdp_comm.snapshots.documents import SnapshotText

call = Collective(
    index=0, kind="all_gather", op="c10d.x", owner="layers.0", issued_in="layers.0",
    phase=Phase.FORWARD, axis="dp", group_size=2, dtype="float32", nbytes_sent=4, nbytes_received=8,
    source=Source.FSDP, call_site="train.py:7",
)
one = Recording(
    rank=0, world_size=2, backend="gloo", torch_version="2",
    mesh_axes=(MeshAxis(name="dp", size=2, dims=((2, 1),)),), collectives=(call,),
)
other = replace(one, collectives=(replace(call, op="c10d.long"),))
old, new = (merge([fold(held)] * 2, ranks=(0, 1)) for held in (one, other))
text = SnapshotText.from_profile(new, where="x")
explained = render_comparison(compare(old, new), snapshot="x")
print(json.dumps([text.splitlines()[3], SnapshotText(str(text), where="x").profile == new,
                  explained.lines]))
"""


def test_declared_field_reaches_file_and_failure(tmp_path):
    package = Path(pytest_fsdp_comm.__file__).parent
    shutil.copytree(package, tmp_path / package.name)
    calls = tmp_path / package.name / "comm" / "calls.py"
    before = "    count: int = 0\n"
    assert before in calls.read_text()
    calls.write_text(calls.read_text().replace(before, DECLARATION + before, 1))
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT],
        env={"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    line, is_read_back, explained = json.loads(done.stdout)
    assert line == "forward layers.0 all_gather[dp] x1 of 8 B float32 weighs 9"
    assert is_read_back
    assert explained == [
        "comm_mode differs from x",
        "  layers.0 in forward: all_gather[dp] x1 of 8 B float32 weighs 6 -> x1 of 8 B float32 "
        "weighs 9, called from train.py:7",
    ]
