"""Writes the tables of docs/reference/options.md from the code: `python docs/settings_table.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import syrupy
from _pytest.config.argparsing import Parser

from pytest_fsdp_comm import options

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGE = Path(__file__).parent / "reference" / "options.md"
START, END = "<!-- table -->\n\n", "\n<!-- end of table -->"

VARIABLES = {
    "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT": "set by `torchrun` and other launchers: this "
    "process is one rank of every test, and meets the others at that address. Without a launcher, "
    "`RANK` and `WORLD_SIZE` are set in each rank",
    "LOCAL_RANK, LOCAL_WORLD_SIZE": "as above, of the ranks on this machine",
    "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, PMI_RANK, PMI_SIZE, "
    "MPI_LOCALRANKID, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID": "set by `mpirun` and "
    "`srun`: several processes without the variables above [are refused](../launchers.md)",
    "CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES": "the GPUs that tests may use; set in each rank to "
    "those of its test",
    "OMP_NUM_THREADS": "set to 1 in each rank, unless it is set",
    "GLOO_SOCKET_IFNAME": "set in each rank to the loopback interface if all ranks are on one "
    "machine and this plugin or torchrun started them, unless it is set",
    "PYTEST_ADDOPTS": "pytest's: arguments before those of the command line",
    "CI, BUILD_NUMBER": "if one is set, a failed comparison shows everything, as with `-vv`",
    "GITHUB_ACTIONS, GITHUB_STEP_SUMMARY, GITHUB_WORKSPACE, GITHUB_SERVER_URL, GITHUB_REPOSITORY, "
    "GITHUB_SHA, GITHUB_HEAD_REF, GITHUB_REF_NAME": "set by GitHub: failed comparisons are "
    "annotated, and told in the step's summary; the report names and links the commit",
    "CI_PROJECT_URL, CI_PROJECT_DIR, CI_COMMIT_SHA, CI_COMMIT_REF_NAME": "set by GitLab: summaries "
    "and the report link lines of the commit",
    "TORCH_FR_BUFFER_SIZE": "torch's: how many collectives its flight recorder keeps. With 0, "
    "recordings are not checked against it",
}

NO_EFFECT = "no effect"
SYRUPY = {
    "--snapshot-update": "records tests that pass, and lists "
    "[unused files](../updating.md#unused-files)",
    "--snapshot-update-new-only": "records what has no file yet",
    "--snapshot-warn-unused": "lists unused files, which then fail no run",
    "--snapshot-disable-unused": "does not look for unused files",
    "--snapshot-no-cleanup": f"{NO_EFFECT}: no file is ever deleted",
    "--snapshot-details": "an update names the files that it writes; unused files are always named",
    "--snapshot-default-extension": NO_EFFECT,
    "--snapshot-no-colors": f"{NO_EFFECT}: see pytest's `--color`",
    "--snapshot-patch-pycharm-diff": NO_EFFECT,
    "--snapshot-diff-mode": f"{NO_EFFECT}: see pytest's `-vv`",
    "--snapshot-ignore-file-extensions": NO_EFFECT,
    "--snapshot-dirname": f"{NO_EFFECT}: see ini `fsdp_comm_snapshot_dir`",
    "--snapshot-declaration-order": NO_EFFECT,
    "--snapshot-file-lock-timeout": NO_EFFECT,
}
"""What each option of syrupy does to communication snapshots."""


def table() -> str:
    """The tables, as Markdown."""
    rows = [("setting", "default", "meaning"), ("---",) * 3]
    for names, default, meaning in [*_settings(), *_variables()]:
        rows.append(("<br>".join(names), default, _with_code(meaning)))
    ours = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    rows = [("option of syrupy", "what syrupy says", "communication snapshots"), ("---",) * 3]
    rows += _syrupy()
    theirs = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    return f"{ours}\n\n{theirs}\n"


def _with_code(text: str) -> str:
    return re.sub(r"(?<!`)--[a-z-]+", r"`\g<0>`", text)


def _syrupy() -> Iterator[tuple[str, str, str]]:
    parser = Parser(_ispytest=True)
    syrupy.pytest_addoption(parser)
    for option in parser.getgroup("syrupy").options:
        (flag,) = option.names()
        yield f"`{flag}`", _with_code(option.attrs()["help"]), SYRUPY[flag]


def _settings() -> Iterator[tuple[list[str], str, str]]:
    for setting in sorted(options.DECLARED, key=lambda one: (not one.flag, not one.ini)):
        names = [f"`{setting.flag}`"] if setting.flag else []
        names += [f"ini `{setting.ini_name}`"] if setting.ini else []
        names += [f"marker `{setting.name}`"] if setting.argument else []
        meaning, _, default = setting.argument.removesuffix(")").partition(" (default: ")
        yield names, setting.shown_default or default, setting.text or meaning


def _variables() -> Iterator[tuple[list[str], str, str]]:
    for names, meaning in VARIABLES.items():
        yield [f"variable `{name}`" for name in names.split(", ")], "", meaning


def main() -> None:
    """Replaces the table on the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    PAGE.write_text(before + START + table() + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
