"""Tasks: `check` takes seconds, `accept` spawns ranks, `cover` measures branch coverage."""

import nox

nox.options.default_venv_backend = "none"
nox.options.sessions = ["check"]


@nox.session
def check(session: nox.Session) -> None:
    """Lint, format, types, layers and the tests that spawn no rank."""
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("mypy")
    session.run("lint-imports")
    session.run("pytest", "-q", "tests/unit", "tests/typing", *session.posargs)


@nox.session
def accept(session: nox.Session) -> None:
    """Everything, with real ranks, in two pytest processes."""
    session.run("pytest", "--world-size", "4", "examples")
    session.run("pytest", "-n", "2", *session.posargs)


@nox.session
def cover(session: nox.Session) -> None:
    """Branch coverage, ranks included."""
    session.run("coverage", "erase")
    session.run("coverage", "run", "-m", "pytest", *session.posargs)
    session.run("coverage", "combine", "--quiet")
    session.run("coverage", "report", "--skip-covered")
