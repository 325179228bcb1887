"""Run the demo or the tests of pytest-fsdp-comm. It needs only Python 3.11 or newer.

usage: python3 run.py demo [pytest's arguments]
       python3 run.py test [pytest's arguments]

  demo   compare a training step of a Hugging Face Llama on 4 ranks with its reviewed snapshots
         (pytest --world-size 4 examples)
  test   run the tests of this project in four processes (pytest -n 4 --dist loadfile)

Both use the active virtual environment. If none is active, they use .venv in the directory of this
file, and create it if it is missing. The first run installs the versions pinned in constraints.txt.
A later run installs them again if constraints.txt, pyproject.toml or Python has changed. Without a
GPU, set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu to save several GB of CUDA
libraries. The exit status is that of pytest, or 2 if pytest could not be started.
"""

# An old Python parses this file before it reaches the version check: use only syntax of 3.6.
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

if sys.version_info < (3, 11):  # noqa: UP036  # tells users of older versions why it fails
    sys.exit(
        "run.py: Python 3.11 or newer is required, this is {} ({}); run it with a newer one, e.g. "
        "python3.11 run.py demo".format(".".join(map(str, sys.version_info[:3])), sys.executable)
    )

ROOT = Path(__file__).resolve().parent
COMMANDS = {
    "demo": ["--world-size", "4", "examples"],
    # Tests wait half of their time for sessions and ranks, so four processes keep two cores busy.
    # `loadfile` runs the tests of a file in one process, where they share module fixtures.
    "test": ["-n", "4", "--dist", "loadfile"],
}
OLDEST = (3, 11)
STAMP = "pytest-fsdp-comm.installed"
# The environment's Python prints its version, and whether it has pip.
QUESTION = (
    "import importlib.util, json, sys; "
    "print(json.dumps([list(sys.version_info[:3]), importlib.util.find_spec('pip') is not None]))"
)


class CannotRunError(Exception):
    """No usable environment; the message has the reason and the remedy."""


def main(arguments: list[str]) -> int:
    """Prepare the environment and replace this process with pytest.

    Returns:
        The exit status if pytest could not be started.
    """
    command, *pytest_arguments = arguments or [""]
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
    return become_pytest(environment, [*COMMANDS[command], *pytest_arguments])


def chosen_environment() -> Path:
    """Return the active virtual environment, or else .venv in the project."""
    if sys.prefix != sys.base_prefix:
        return Path(sys.prefix)
    active = os.environ.get("VIRTUAL_ENV")
    if not active:
        return ROOT / ".venv"
    if not python_of(Path(active)).exists():
        raise CannotRunError(
            f"VIRTUAL_ENV is set to {active}, which has no bin/python; unset it (`deactivate`) to "
            "use .venv"
        )
    return Path(active)


def prepare(environment: Path) -> None:
    """Create the environment and install into it, unless it is up to date."""
    if not python_of(environment).exists():
        say(f"creating the virtual environment {environment}")
        make([sys.executable, "-m", "venv", str(environment)], environment)
    version, has_pip = json.loads(ask(environment))
    if tuple(version) < OLDEST:
        raise CannotRunError(
            f"the virtual environment {environment} has Python {'.'.join(map(str, version))}, "
            "expected 3.11 or newer; deactivate it, or recreate it with a newer Python"
        )
    stamp = environment / STAMP
    wanted = fingerprint(version)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return
    if not has_pip:
        make([str(python_of(environment)), "-m", "ensurepip"], environment)
    # Delete the stamp first, so that an interrupted installation does not count as complete.
    stamp.unlink(missing_ok=True)
    install(environment)
    stamp.write_text(wanted, encoding="utf-8")


def make(command: list[str], environment: Path) -> None:
    """Run venv or ensurepip."""
    if subprocess.run(command, check=False).returncode:
        raise CannotRunError(
            f"`{' '.join(command)}` failed, see above. On Debian and Ubuntu, Python's venv is a "
            "separate package: run `sudo apt install python3-venv`, then delete "
            f"{environment} and run this again"
        )


def install(environment: Path) -> None:
    """Install the project and its test dependencies in the pinned versions."""
    say(f"installing into {environment}; this takes minutes the first time")
    pip = [str(python_of(environment)), "-m", "pip", "install", "--disable-pip-version-check"]
    command = [*pip, "--quiet", "-c", "constraints.txt", "-e", ".[test]"]
    if subprocess.run(command, cwd=ROOT, check=False).returncode:
        raise CannotRunError(
            f"`{' '.join(command)}` failed in {ROOT}, see above. Is the network up, or "
            "PIP_INDEX_URL set to a mirror? Nothing was run; fix the problem and run this again"
        )


def ask(environment: Path) -> str:
    """Run `QUESTION` in the environment's Python, and return what it prints."""
    command = [str(python_of(environment)), "-I", "-c", QUESTION]
    try:
        return subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout.decode()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotRunError(
            f"the Python in {environment} does not run ({error}); delete that directory and run "
            "this again"
        ) from None


def fingerprint(version: list[int]) -> str:
    """Hash everything that an installation depends on: the checkout, its pins, and Python."""
    parts = [str(ROOT).encode(), repr(version).encode()]
    parts += [(ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt")]
    return hashlib.sha256(b"\0".join(parts)).hexdigest() + "\n"


def become_pytest(environment: Path, arguments: list[str]) -> NoReturn:
    """Replace this process with pytest, so that pytest gets all signals."""
    pytest = str(environment / "bin" / "pytest")
    os.chdir(ROOT)
    os.execve(pytest, [pytest, *arguments], activated(environment))  # noqa: S606  # see above


def activated(environment: Path) -> dict[str, str]:
    """Return the variables that `activate` sets; tests run other commands of the environment."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONHOME"}
    path = os.pathsep.join([str(environment / "bin"), variables.get("PATH", os.defpath)])
    return {**variables, "VIRTUAL_ENV": str(environment), "PATH": path}


def python_of(environment: Path) -> Path:
    """Return the path of the environment's Python."""
    return environment / "bin" / "python"


def say(text: str) -> None:
    """Print a line about a step that takes time."""
    print(f"run.py: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
