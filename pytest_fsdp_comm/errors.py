"""Errors that a user can cause, each with what was expected, what came, where, and the remedy."""

from __future__ import annotations


class FsdpCommError(Exception):
    """Base of every error that this plugin raises on purpose."""


class EmptyRecordingError(FsdpCommError):
    """An empty recording, or a tree without one sharded parameter, met a snapshot."""


class SnapshotFormatError(FsdpCommError):
    """A snapshot file is corrupted, truncated, empty, or of a newer format."""


class RecordingError(FsdpCommError):
    """The recorder was used in a way that cannot give a true recording."""


class UpstreamChangedError(FsdpCommError):
    """A private name of torch, pytest or syrupy that the plugin relies on is missing."""


class RanksDivergedError(FsdpCommError):
    """The ranks of one test did not reach the same comparison."""


class UnseenCollectivesWarning(UserWarning):
    """Collectives ran while a recording was under way, on threads that it does not watch."""
