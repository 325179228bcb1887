"""``fsdp-comm test``: write a test and its snapshots from the recording of a script."""

from __future__ import annotations

import argparse
import json
import os
import unicodedata
from pathlib import Path
from typing import Final

from pytest_fsdp_comm.comm.json import ScriptRun, load_run
from pytest_fsdp_comm.command_line import documents
from pytest_fsdp_comm.command_line.terminal import SAME
from pytest_fsdp_comm.errors import FsdpCommError, printable
from pytest_fsdp_comm.launch_environment import simulated_variables
from pytest_fsdp_comm.snapshots.documents import Profile
from pytest_fsdp_comm.snapshots.names import SUFFIX, make_basename, module_to_directory
from pytest_fsdp_comm.text.files import write_all_atomically
from pytest_fsdp_comm.text.words import shell_word, show_path
from pytest_fsdp_comm.tree.profile import TreeProfile

_TEST: Final = '''"""Guard the communication {subject}of a training step of {script}."""

{imports}
from pytest_fsdp_comm import record_script


@pytest.mark.distributed({marks})
def {name}({fixtures}, comm_snapshot):
{host}    {result}record_script(
        comm_mode,
{arguments}    )
    assert {compared} == comm_snapshot
'''


def run(options: argparse.Namespace) -> int:
    """Run ``fsdp-comm test``."""
    recording = Path(options.recording)
    tree = recording.with_suffix(f".tree{SUFFIX}")
    is_json = recording.suffix == ".json"
    saved = documents.read_json(recording, where=str(recording)) if is_json else None
    ran = load_run(recording.read_text(encoding="utf-8")) if isinstance(saved, list) else None
    if ran is None or not tree.is_file() or ran.first_step != ran.last_step:
        raise FsdpCommError(
            f"{recording}: expected the recording of one step of a script, with {tree.name} in the "
            "same directory; record both with fsdp-comm record --out step.comm train.py"
        )
    comm = documents.read_document(recording)
    name = _make_test_name(ran)
    start = _find_directory_of_run(ran, recording)
    collected, patterns = documents.find_collected(start)
    directory = start if any(map(start.is_relative_to, collected)) else collected[0]
    test = Path(options.output).absolute() if options.output else directory / f"{name}.py"
    root, snapshot_dir = documents.find_project(test.parent)
    folder = snapshot_dir / module_to_directory(test, root)
    variant = f"ws{comm.profile.world_size}"
    comm_name, tree_name = (make_basename(name, variant, index) for index in (0, "tree"))
    trees = documents.read_document(tree)
    # A comparison refuses a tree without units and DTensors.
    has_tree = isinstance(trees.profile, TreeProfile) and any(
        facts.is_distributed for facts in trees.profile.trees.values()
    )
    source = _make_test_source(ran, start / ran.script, test, comm.profile, has_tree=has_tree)
    files = {
        test: source,
        folder / f"{comm_name}{SUFFIX}": comm,
        **({folder / f"{tree_name}{SUFFIX}": trees} if has_tree else {}),
    }
    for file in files:
        if file.exists():
            update = f"pytest --snapshot-update {shell_word(os.path.relpath(test))}"
            raise FsdpCommError(
                f"{show_path(file)} already exists: to accept a new recording, run {update}; to "
                "write a new test, remove the file, or choose another test file with -o"
            )
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    write_all_atomically(files)
    command = f"pytest {shell_word(os.path.relpath(test))}"
    print(f"wrote {show_path(test)} and {show_path(folder)}: review both, then run {command}")  # noqa: T201  # the program's output
    if not (any(map(test.match, patterns)) and any(map(test.is_relative_to, collected))):
        print("pytest without arguments does not run it: see testpaths and python_files")  # noqa: T201  # as above
    return SAME


def _find_directory_of_run(ran: ScriptRun, recording: Path) -> Path:
    """Return the directory in which the script was recorded."""
    candidates = (Path.cwd(), *recording.absolute().parents)
    start = next(
        (path for path in candidates if ran.is_module or (path / ran.script).is_file()), None
    )
    if start is None:
        raise FsdpCommError(
            f"{recording} was recorded from {ran.script}, which was not found; run fsdp-comm test "
            "in the directory where fsdp-comm record ran"
        )
    return start


def _make_test_name(ran: ScriptRun) -> str:
    """Name the test after the script, without characters that a function's name cannot contain."""
    # Python normalizes identifiers, and pytest names a test after its function.
    script = ran.script if ran.is_module else Path(ran.script).stem
    normalized = unicodedata.normalize("NFKC", script)
    return "test_" + "".join(char if f"_{char}".isidentifier() else "_" for char in normalized)


def _make_string_literal(text: str) -> str:
    """Return a string literal, with double quotes if it needs no escapes but those of JSON."""
    return json.dumps(text, ensure_ascii=False) if text.isprintable() else ascii(text)


def _make_test_source(
    ran: ScriptRun, path: Path, test: Path, profile: Profile, *, has_tree: bool
) -> str:
    marks = [f"world_size={profile.world_size}"]
    if profile.recorded_ranks:  # only one rank was simulated
        marks += ["simulate=True", f"ranks={[*profile.recorded_ranks]}"]
    host = [
        f'    monkeypatch.setenv("{variable}", "{value}")\n'
        for variable, value in simulated_variables(
            (*profile.recorded_ranks, 0)[0], profile.world_size, ran.local_world_size
        ).items()
        if ran.local_world_size and variable.startswith("LOCAL")
    ]
    imports, script = "import pytest\n", _make_string_literal(ran.script)
    if not ran.is_module:
        imports = f"from pathlib import Path\n\n{imports}"
        relative = _make_string_literal(os.path.relpath(path, test.parent))
        script = f"str(Path(__file__).parent / {relative})"
    arguments = [script, *map(_make_string_literal, ran.arguments), f"step={ran.first_step}"]
    arguments += ["is_module=True"] if ran.is_module else []
    return _TEST.format(
        script=_make_string_literal(printable(path.name))[1:-1],
        imports=imports,
        marks=", ".join(marks),
        name=_make_test_name(ran),
        fixtures=", ".join(
            [*(["monkeypatch"] if host else []), "comm_mode", *(["fsdp_tree"] if has_tree else [])]
        ),
        subject="and the sharding " if has_tree else "",
        result="model = " if has_tree else "",
        compared='{"comm": comm_mode, "tree": fsdp_tree(model)}' if has_tree else "comm_mode",
        host="".join(host),
        arguments="".join(f"        {argument},\n" for argument in arguments),
    )
