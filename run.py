"""Runs the main job or the tests of pytest-fsdp-comm, with nothing but Python 3.11 or newer.

usage: python3 run.py demo [pytest's arguments]
       python3 run.py test [pytest's arguments]

  demo   the main job: a training step of a Hugging Face Llama on 4 ranks, compared with the
         reviewed snapshots (pytest --world-size 4 examples)
  test   this project's tests, in two processes (pytest -n 2)

Both run in the virtual environment that is active, else in .venv beside this file, which is made if
it is not there. What constraints.txt pins is installed when it, pyproject.toml or Python changed.
On a machine without a GPU, PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu saves several
GB of CUDA libraries. The exit status is pytest's; it is 2 if there was no run.
"""

# Old Pythons read this file as far as the check of their version, so its syntax is that of 3.6.
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

if sys.version_info < (3, 11):  # noqa: UP036  # whoever has an older one shall read why it fails
    sys.exit(
        "run.py: Python 3.11 or newer is needed, this is {} ({}); run it with a newer one, e.g. "
        "python3.11 run.py demo".format(".".join(map(str, sys.version_info[:3])), sys.executable)
    )

ROOT = Path(__file__).resolve().parent
COMMANDS = {"demo": ["--world-size", "4", "examples"], "test": ["-n", "2"]}
OLDEST = (3, 11)
STAMP = "pytest-fsdp-comm.installed"
# What the environment's own Python says of itself.
QUESTION = (
    "import importlib.util, json, sys; "
    "print(json.dumps([list(sys.version_info[:3]), importlib.util.find_spec('pip') is not None]))"
)


class CannotRunError(Exception):
    """There is no environment to run in; says why, and what to do."""


def main(arguments: list[str]) -> int:
    """Prepares the environment and becomes pytest.

    Returns:
        The exit status where pytest did not start.
    """
    command, *others = arguments or [""]
    if command not in COMMANDS:
        is_asked = command in {"-h", "--help"}
        print(__doc__.strip(), file=sys.stdout if is_asked else sys.stderr)
        return 0 if is_asked else 2
    try:
        environment = chosen_environment()
        prepare(environment)
    except CannotRunError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return become_pytest(environment, [*COMMANDS[command], *others])


def chosen_environment() -> Path:
    """The virtual environment that is active, else the project's own."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix)
    active = os.environ.get("VIRTUAL_ENV")
    if not active:
        return ROOT / ".venv"
    if not python_of(Path(active)).exists():
        raise CannotRunError(
            f"the variable VIRTUAL_ENV names {active}, where there is no bin/python; unset it "
            "(`deactivate`), and .venv is used"
        )
    return Path(active)


def prepare(environment: Path) -> None:
    """Makes the environment and installs into it, as far as that is not done."""
    if not python_of(environment).exists():
        say(f"making the virtual environment {environment}")
        make([sys.executable, "-m", "venv", str(environment)], environment)
    version, has_pip = json.loads(ask(environment))
    if tuple(version) < OLDEST:
        raise CannotRunError(
            f"the virtual environment {environment} has Python {'.'.join(map(str, version))}, "
            "expected 3.11 or newer; deactivate it, or make it anew with a newer Python"
        )
    stamp = environment / STAMP
    wanted = fingerprint(version)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    if not has_pip:
        make([str(python_of(environment)), "-m", "ensurepip"], environment)
    # Gone while pip works, so that an interrupted installation is not taken for a whole one.
    stamp.unlink(missing_ok=True)
    install(environment)
    stamp.write_text(wanted, encoding="utf-8")


def make(command: list[str], environment: Path) -> None:
    """Runs venv or ensurepip."""
    if subprocess.run(command, check=False).returncode:
        raise CannotRunError(
            f"`{' '.join(command)}` failed, see above. On Debian and Ubuntu, Python's venv is a "
            "package of its own: sudo apt install python3-venv. Then delete "
            f"{environment} and run this again"
        )


def install(environment: Path) -> None:
    """Installs the project and what its tests need, in the pinned versions."""
    say(f"installing into {environment}; the first time this takes minutes")
    pip = [str(python_of(environment)), "-m", "pip", "install", "--disable-pip-version-check"]
    command = [*pip, "--quiet", "-c", "constraints.txt", "-e", ".[test]"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise CannotRunError(
            f"`{' '.join(command)}` failed in {ROOT}, see above: is there a network, or "
            "PIP_INDEX_URL for a mirror? Nothing was run; run this again when it is mended"
        )


def ask(environment: Path) -> str:
    """What the environment's Python says."""
    command = [str(python_of(environment)), "-I", "-c", QUESTION]
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRunError(
            f"the Python of {environment} does not run ({error}); delete that directory, and run "
            "this again"
        ) from None


def fingerprint(version: list[int]) -> str:
    """What an installation depends on: the checkout that it leads to, its pins, and Python."""
    parts = [str(ROOT).encode(), repr(version).encode()]
    parts += [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest() + "\n"


def become_pytest(environment: Path, arguments: list[str]) -> NoReturn:
    """Ends this program and starts pytest in its place, so that all signals are pytest's."""
    pytest = str(environment / "bin" / "pytest")
    os.chdir(ROOT)
    os.execve(pytest, [pytest, *arguments], activated(environment))  # noqa: S606  # see above


def activated(environment: Path) -> dict[str, str]:
    """The variables as after `activate`, since tests start other commands of the environment."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    path = os.pathsep.join([str(environment / "bin"), variables.get("PATH", os.defpath)])
    return {**variables, "VIRTUAL_ENV": str(environment), "PATH": path}


def python_of(environment: Path) -> Path:
    """The environment's Python."""
    return environment / "bin" / "python"


def say(text: str) -> None:
    """Tells what takes time."""
    print(f"run.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
