"""Write the tables of docs/reference/options.md from the code: `python docs/settings_table.py`."""

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
    "process is one rank of every test. pytest sets the first two in ranks that it starts",
    "LOCAL_RANK, LOCAL_WORLD_SIZE": "set by the launcher: rank and number of ranks on this machine",
    "OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_LOCAL_RANK, PMI_RANK, PMI_SIZE, "
    "MPI_LOCALRANKID, SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID": "set by `mpirun` and "
    "`srun`: [translate them](../how-to/gpus-and-clusters.md#mpirun-and-srun) to the variables "
    "above",
    "CUDA_VISIBLE_DEVICES, HIP_VISIBLE_DEVICES": "the GPUs that tests may use; in each rank, the "
    "GPUs of its test",
    "OMP_NUM_THREADS": "set to 1 in ranks if unset",
    "GLOO_SOCKET_IFNAME": "set in ranks to the loopback interface, if unset and pytest or torchrun "
    "started all ranks on one machine",
    "PYTEST_ADDOPTS": "read by pytest: arguments to put before those of the command line",
    "CI, BUILD_NUMBER": "if one is set, failed comparisons end with a diff of the snapshot, as "
    "with `-vv`",
    "GITHUB_ACTIONS, GITHUB_STEP_SUMMARY, GITHUB_WORKSPACE, GITHUB_SERVER_URL, GITHUB_REPOSITORY, "
    "GITHUB_SHA, GITHUB_HEAD_REF, GITHUB_REF_NAME, GITHUB_RUN_ID": "set by GitHub: failed "
    "comparisons appear as annotations and in the step summary, which links the run's artifacts; "
    "the report links the commit",
    "CI_PROJECT_URL, CI_PROJECT_DIR, CI_COMMIT_SHA, CI_COMMIT_REF_NAME, CI_JOB_ID": "set by "
    "GitLab: summaries and the report link lines of the commit, and summaries the job's artifacts",
    "TORCH_FR_BUFFER_SIZE": "read by torch: the capacity of its flight recorder, in collectives; "
    "with 0, recordings are not checked against it",
}

NO_EFFECT = "no effect"
SYRUPY = {
    "--snapshot-update": "writes the snapshots of tests that pass, and lists "
    "[unused files](../updating.md#unused-files)",
    "--snapshot-update-new-only": "writes only snapshots that do not exist yet",
    "--snapshot-warn-unused": "lists unused files without failing the run",
    "--snapshot-disable-unused": "does not look for unused files",
    "--snapshot-no-cleanup": f"{NO_EFFECT}: no file is ever deleted",
    "--snapshot-details": "lists the files that an update writes; unused files are always listed",
    "--snapshot-default-extension": NO_EFFECT,
    "--snapshot-no-colors": f"{NO_EFFECT}: use pytest's `--color`",
    "--snapshot-patch-pycharm-diff": NO_EFFECT,
    "--snapshot-diff-mode": f"{NO_EFFECT}: use pytest's `-vv`",
    "--snapshot-ignore-file-extensions": NO_EFFECT,
    "--snapshot-dirname": f"{NO_EFFECT}: use ini `fsdp_comm_snapshot_dir`",
    "--snapshot-declaration-order": NO_EFFECT,
    "--snapshot-file-lock-timeout": NO_EFFECT,
}
"""The effect of each syrupy option on communication snapshots."""


def table() -> str:
    """Return the tables of settings and of syrupy's options as Markdown."""
    rows = [("setting", "default", "meaning"), ("---",) * 3]
    for names, default, meaning in [*_settings(), *_variables()]:
        rows.append(("<br>".join(names), default, _with_code(meaning)))
    settings = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    syrupy_rows = [
        ("option of syrupy", "effect on communication snapshots"),
        ("---",) * 2,
        *_syrupy(),
    ]
    syrupy_options = "\n".join(f"| {' | '.join(row)} |" for row in syrupy_rows)
    return f"{settings}\n\n{syrupy_options}\n"


def _with_code(text: str) -> str:
    return re.sub(r"(?<!`)--[a-z-]+", r"`\g<0>`", text)


def _syrupy() -> Iterator[tuple[str, str]]:
    parser = Parser(_ispytest=True)
    syrupy.pytest_addoption(parser)
    flags = [flag for option in parser.getgroup("syrupy").options for flag in option.names()]
    by_effect: dict[str, list[str]] = {}
    for flag in flags:
        by_effect.setdefault(SYRUPY[flag], []).append(f"`{flag}`")
    for effect, names in by_effect.items():
        yield "<br>".join(names), effect


def _settings() -> Iterator[tuple[list[str], str, str]]:
    for setting in sorted(
        options.DECLARED, key=lambda setting: (not setting.flag, not setting.ini)
    ):
        names = [f"`{setting.flag}`"] if setting.flag else []
        names += [f"ini `{setting.ini_name}`"] if setting.ini else []
        names += [f"marker `{setting.name}`"] if setting.argument else []
        meaning, _, default = setting.argument.removesuffix(")").partition(" (default: ")
        yield names, setting.default_text or default, setting.text or meaning


def _variables() -> Iterator[tuple[list[str], str, str]]:
    for names, meaning in VARIABLES.items():
        yield [f"variable `{name}`" for name in names.split(", ")], "", meaning


def main() -> None:
    """Replace the tables on the page."""
    before, _, after = PAGE.read_text(encoding="utf-8").partition(START)
    PAGE.write_text(before + START + table() + END + after.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
