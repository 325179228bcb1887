"""Answer queries on a recording: check the names that users pass, and select collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, SupportsIndex

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, Collective, Phase
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.text.fqn import NO_MODULE, fold_fqns, make_matcher
from pytest_fsdp_comm.text.words import join_first

# A query with an unknown name raises an error. If it returned 0, an assertion with a typo, such as
# `counts(owner="layer.0") == 0`, would always pass. To tell unused names from unknown ones,
# `comm_mode` stores the names of all modules and axes; error messages list them.

_MAX_LISTED: Final = 12
_ELSEWHERE: Final = {
    "unshard": "; unshard and reshard are not collectives; see comm_mode.reshards",
    "reshard": "; unshard and reshard are not collectives; see comm_mode.reshards",
    "redistribute": "; redistributions are not collectives; see comm_mode.redistributions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """The names that queries on one rank's recording may use."""

    modules: Mapping[str, str]
    """Maps each module's path, including the segments that wrappers add, to the module's FQN."""
    owners: frozenset[str]
    """FQNs of all modules and units, and all other owners of collectives."""
    axes: frozenset[str]
    """Names of all mesh axes and of all other process groups, even unused ones."""
    groups: Mapping[str, str]
    """Maps the name of each process group of this rank to the name of its axis in the recording."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Maps an axis name to the name that the recording uses for the same process group."""
    kinds: frozenset[str]
    """Kinds in the recording that are not in `COLLECTIVE_KINDS`."""
    has_model: bool
    """Whether a model was passed to `comm_mode`; if not, only modules that ran are known."""

    def add_axes(self, pairs: Iterable[tuple[str, str]], recorded: Iterable[Collective]) -> Names:
        """Add mesh axes; each pair is the name of an axis and the name of its process group."""
        axes, renamed = set(self.axes), {}
        recorded_axes = {event.axis for event in recorded}
        for name, group in pairs:
            # A mesh over all ranks uses the default group, which the recording may call `world`.
            recorded_name = self.groups.get(group)
            if recorded_name in {None, name} or recorded_name not in recorded_axes:
                axes.add(name)
            else:
                renamed[name] = recorded_name
        return replace(self, axes=frozenset(axes), renamed=renamed)

    def fqn(self, name: str) -> str | None:
        """Return the FQN of the module that has this name; None if there is no such module."""
        return name if name in self.owners else self.modules.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Selects the collectives that match all fields; a field that is None matches everything."""

    kind: str | None = None
    phase: str | None = None
    owner: str | None = None
    axis: str | None = None
    exposed: bool | None = None

    def __str__(self) -> str:
        args = [] if self.kind is None else [repr(str(self.kind))]
        for name in ("phase", "owner", "axis"):
            value = getattr(self, name)
            if value is not None:
                args.append(f"{name}={str(value)!r}")
        args += [] if self.exposed is None else [f"exposed={self.exposed}"]
        return ", ".join(args)


class Answer(int):
    """An integer that also stores the collectives behind it; arithmetic returns a plain int."""

    expression: str
    """The query as a user would write it, such as ``counts('all_gather')``."""
    matching: Sequence[Collective]
    """The collectives that match the query, in the order in which they were issued."""
    recorded: Sequence[Collective]

    def __new__(  # noqa: PYI034  # never subclassed
        cls,
        value: SupportsIndex,
        expression: str,
        matching: Sequence[Collective],
        recorded: Sequence[Collective],
    ) -> Answer:
        answer = super().__new__(cls, value)
        answer.expression, answer.matching, answer.recorded = expression, matching, recorded
        return answer

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """Turn copies and pickles into plain integers."""
        return int, (int(self),)


def select(
    question: Question, recorded: Sequence[Collective], names: Names
) -> tuple[Collective, ...]:
    """Return the collectives that a question selects; raise RecordingError for unknown names."""
    __tracebackhide__ = True
    _check_known_name("kind", question.kind, (*COLLECTIVE_KINDS, *sorted(names.kinds)))
    _check_known_name("phase", question.phase, tuple(Phase))
    name = None if question.axis is None else names.renamed.get(question.axis)
    if name is not None:
        raise RecordingError(
            f"axis {question.axis!r} is called {name!r} in this recording, since both are the "
            f"same process group; use axis={name!r}"
        )
    _check_known_name("axis", question.axis, sorted(names.axes))
    owns = _make_owner_predicate(question.owner, names)
    return tuple(
        event
        for event in recorded
        if question.kind in {None, event.kind}
        and question.phase in {None, event.phase}
        and question.axis in {None, event.axis}
        and owns(event.owner)
        and question.exposed in {None, event.exposed}
    )


def _check_known_name(parameter: str, value: str | None, allowed: Sequence[str]) -> None:
    __tracebackhide__ = True
    if value is None or value in allowed:
        return
    listed = (
        f"expected one of {_join_first_names(allowed)}" if allowed else "the recording has none"
    )
    if not isinstance(value, str):
        raise RecordingError(f"{parameter} must be a name, got {type(value).__name__}; {listed}")
    raise RecordingError(f"there is no {parameter} {value!r}; {listed}{_ELSEWHERE.get(value, '')}")


def _make_owner_predicate(name: str | None, names: Names) -> Callable[[str | None], bool]:
    __tracebackhide__ = True
    if name is None:
        return lambda _: True
    if not isinstance(name, str):
        raise RecordingError(
            f"owner must be the name of a module such as 'layers.0', got {type(name).__name__}; "
            "use a name as written in the snapshot, or '' for the root"
        )
    if name == NO_MODULE:
        return lambda owner: owner is None
    fqn = names.fqn(name)
    if fqn is not None:
        return lambda owner: owner == fqn
    try:
        matches = make_matcher(name)
    except ValueError as error:
        raise RecordingError(f"owner: {error}") from None
    owners = {owner for owner in names.owners if matches(owner)}
    if not owners:
        raise RecordingError(_describe_unmatched_module(name, names))
    return lambda owner: owner in owners


def _describe_unmatched_module(name: str, names: Names) -> str:
    is_pattern = any(mark in name for mark in "{*")
    missing = f"no module matches {name!r}" if is_pattern else f"there is no module {name!r}"
    patterns = fold_fqns(names.owners)
    listed = ", ".join(part for part in (_join_first_names(patterns), NO_MODULE) if part)
    if names.has_model:
        return f"{missing} in the model passed to comm_mode; expected one of {listed}"
    return (
        f"{missing} among the modules that ran; expected one of {listed}; for modules that did not "
        "run, use `with comm_mode(model):`"
    )


def _join_first_names(names: Sequence[str]) -> str:
    return join_first([name for name in names if name], _MAX_LISTED)
