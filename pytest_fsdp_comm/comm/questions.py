"""Questions to a recording: which collectives are meant, and what there is to ask for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, SupportsIndex

from pytest_fsdp_comm.comm.events import COLLECTIVE_KINDS, Collective, Phase
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.text.fqn import NO_MODULE, fold_fqns, matcher

# Note [Names that nothing has]: a name that no collective can have is an error and not a count of
# 0: a guard such as `counts(owner="layer.0") == 0` would hold for ever. So a block keeps all names
# that there were, used or not, and the errors list them.

_MAX_LISTED: Final = 12
_ELSEWHERE: Final = {
    "unshard": "; unshard and reshard are not collectives; see comm_mode.reshards",
    "reshard": "; unshard and reshard are not collectives; see comm_mode.reshards",
    "redistribute": "; redistributions are not collectives; see comm_mode.redistributions",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What one rank's recording can be asked for."""

    modules: Mapping[str, str]
    """Name of each module with the segments of wrappers -> its FQN."""
    owners: frozenset[str]
    """FQNs of all modules and units, and of whatever else owns a collective."""
    axes: frozenset[str]
    """Names of mesh axes and groups, used or not."""
    groups: Mapping[str, str]
    """Name of each process group that this rank is in -> name of its axis in the recording."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Name of an axis -> name by which the recording has its collectives."""
    kinds: frozenset[str]
    """Kinds of collectives beyond `COLLECTIVE_KINDS`."""
    has_model: bool
    """Whether the model was given; else only the modules that ran are known."""

    def with_axes(self, living: Iterable[tuple[str, str]], recorded: Iterable[Collective]) -> Names:
        """Add axes that still exist: the name of each, and that of its process group."""
        axes, renamed = set(self.axes), {}
        sent_over = {event.axis for event in recorded}
        for name, group in living:
            # A mesh over all ranks has the default group, which may go by another name here.
            recorded_as = self.groups.get(group)
            if recorded_as in {None, name} or recorded_as not in sent_over:
                axes.add(name)
            else:
                renamed[name] = recorded_as
        return replace(self, axes=frozenset(axes), renamed=renamed)

    def fqn(self, name: str) -> str | None:
        """The FQN of a module that a user names; None if there is none."""
        return name if name in self.owners else self.modules.get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Which collectives are meant; None means all."""

    kind: str | None = None
    phase: str | None = None
    owner: str | None = None
    axis: str | None = None

    def __str__(self) -> str:
        given = [] if self.kind is None else [repr(str(self.kind))]
        for name in ("phase", "owner", "axis"):
            value = getattr(self, name)
            if value is not None:
                given.append(f"{name}={str(value)!r}")
        return ", ".join(given)


class Answer(int):
    """An int whose failed comparison shows what was counted; sums and the like are plain."""

    asked: str
    """The question, as a user writes it: ``counts('all_gather')``."""
    matching: Sequence[Collective]
    """In the order of issue."""
    recorded: Sequence[Collective]

    def __new__(  # noqa: PYI034  # never subclassed
        cls,
        value: SupportsIndex,
        asked: str,
        matching: Sequence[Collective],
        recorded: Sequence[Collective],
    ) -> Answer:
        answer = super().__new__(cls, value)
        answer.asked, answer.matching, answer.recorded = asked, matching, recorded
        return answer

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        """A copy is a plain number."""
        return int, (int(self),)


def select(
    question: Question, recorded: Sequence[Collective], names: Names
) -> tuple[Collective, ...]:
    """Find the collectives that are meant; see Note [Names that nothing has]."""
    __tracebackhide__ = True
    _check("kind", question.kind, (*COLLECTIVE_KINDS, *sorted(names.kinds)))
    _check("phase", question.phase, tuple(Phase))
    name = None if question.axis is None else names.renamed.get(question.axis)
    if name is not None:
        raise RecordingError(
            f"axis {question.axis!r} is called {name!r} in this recording, since both are the "
            f"same process group; use axis={name!r}"
        )
    _check("axis", question.axis, sorted(names.axes))
    owns = _owner_test(question.owner, names)
    return tuple(
        event
        for event in recorded
        if question.kind in {None, event.kind}
        and question.phase in {None, event.phase}
        and question.axis in {None, event.axis}
        and owns(event.owner)
    )


def _check(what: str, asked: str | None, allowed: Sequence[str]) -> None:
    __tracebackhide__ = True
    if asked is None or asked in allowed:
        return
    if not isinstance(asked, str):
        raise RecordingError(
            f"{what} must be a name such as {str(allowed[0])!r}, got {type(asked).__name__}; "
            f"expected one of {', '.join(allowed)}"
        )
    raise RecordingError(
        f"there is no {what} {asked!r}; expected one of {_listed(allowed)}"
        f"{_ELSEWHERE.get(asked, '')}"
    )


def _owner_test(asked: str | None, names: Names) -> Callable[[str | None], bool]:
    __tracebackhide__ = True
    if asked is None:
        return lambda _: True
    if not isinstance(asked, str):
        raise RecordingError(
            f"owner must be the name of a module such as 'layers.0', got "
            f"{type(asked).__name__}; the root is '', the others are as snapshots print them"
        )
    if asked == NO_MODULE:
        return lambda owner: owner is None
    fqn = names.fqn(asked)
    if fqn is not None:
        return lambda owner: owner == fqn
    try:
        matches = matcher(asked)
    except ValueError as error:
        raise RecordingError(f"owner: {error}") from None
    meant = {name for name in names.owners if matches(name)}
    if not meant:
        raise RecordingError(_no_owner(asked, names))
    return lambda owner: owner in meant


def _no_owner(asked: str, names: Names) -> str:
    is_pattern = any(mark in asked for mark in "{*")
    missing = f"no module matches {asked!r}" if is_pattern else f"there is no module {asked!r}"
    patterns = fold_fqns(names.owners)
    listed = ", ".join(part for part in (_listed(patterns), NO_MODULE) if part)
    if names.has_model:
        return f"{missing} in the model passed to comm_mode; expected one of {listed}"
    return (
        f"{missing} among those that ran, and a bare `with comm_mode:` knows no others; use "
        f"`with comm_mode(model):`, or one of {listed}"
    )


def _listed(known: Sequence[str]) -> str:
    named = [name for name in known if name]
    more = len(named) - _MAX_LISTED
    listed = ", ".join(named[:_MAX_LISTED])
    return f"{listed} and {more} more" if more > 0 else listed
