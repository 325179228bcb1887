"""The errors of a command, for standard error and exit status 2."""

from __future__ import annotations

from pytest_fsdp_comm.errors import FsdpCommError


class CommandError(FsdpCommError):
    """A command cannot do what was asked; the text says why, and what to do."""
