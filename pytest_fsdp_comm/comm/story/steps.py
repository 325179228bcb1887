"""The changes of which stories are made: each turns the contents of modules into others.

A step tells an effect: what is different, not why. It is exact or it is not told, so each says what
it `claims`: where anything else is different at the end, the step is refuted.

A transformation works anywhere (`Renamed`, `Layers`, `Counts`, ...). A `Replaced` has the rows that
it writes from the new profile; what makes it more than a list of rows is what was checked before it
was proposed, which its class says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

from pytest_fsdp_comm.comm.events import Phase, Role
from pytest_fsdp_comm.comm.profile import RowKey
from pytest_fsdp_comm.comm.story.facts import Facts, Owner, count_of, once
from pytest_fsdp_comm.comm.story.names import replace_prefix, template

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_fsdp_comm.comm.story.facts import Content, Fact, Pool, State

Writes: TypeAlias = Literal["names", "layers", "counts", "sizes", "dtype", "rows", "mesh"]

PASSES: Final = frozenset({Phase.FORWARD, Phase.BACKWARD, Phase.RECOMPUTE})


@dataclass(frozen=True, kw_only=True)
class Step:
    """One change."""

    order: ClassVar[int]
    """Steps are applied in this order: names first, single modules last."""
    writes: ClassVar[Writes]
    """What of a row it writes; two steps must not write the same of one row."""

    @property
    def description_cost(self) -> float:
        """What telling it costs, in lines: 4 is a line of a collective that is left over."""
        raise NotImplementedError

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        raise NotImplementedError

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """Whether it says something about a fact, of the old profile after it or of the new one."""
        raise NotImplementedError


class GlobalStep(Step):
    """A step that changes facts alike in all modules."""

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        # By identity: equal contents are one object.
        made: dict[int, Content | None] = {}
        after: dict[Owner, Content] = {}
        for owner, content in state.items():
            if not self.includes(owner):
                after[owner] = content
                continue
            if id(content) not in made:
                facts: Counter[Fact] = Counter()
                for fact, count in content.facts.items():
                    changed, times = self.change(fact, count, content)
                    facts[changed] += times
                made[id(content)] = pool.content(facts)
            new = made[id(content)]
            if new is not None:
                after[owner] = new
        return after

    def includes(self, owner: Owner) -> bool:
        """Whether it changes anything of an owner."""
        return True

    def change(self, fact: Fact, count: int, content: Content) -> tuple[Fact, int]:
        """A fact and its count after the step."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class AxisRenamed(GlobalStep):
    """All that went over one mesh axis goes over another one, which is new."""

    order = 0
    writes = "mesh"
    old: str
    new: str
    is_alike: bool
    """Whether both lie alike among the ranks: then it is a name that changed."""

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        return 2.0

    def change(self, fact: Fact, count: int, content: Content) -> tuple[Fact, int]:
        """See `GlobalStep.change`."""
        if fact.row.axis != self.old:
            return fact, count
        return fact._replace(row=fact.row._replace(axis=self.new)), count

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """Nothing is left on the old axis."""
        return fact.row.axis == self.old


@dataclass(frozen=True, kw_only=True)
class Renamed(Step):
    """Modules have other names: all below a prefix, or all but the root's parameters."""

    order = 1
    writes = "names"
    old: str
    """A prefix whose numbers are written ``*``; empty for everything."""
    new: str
    keeps_root: bool = False
    """The root stays the root: everything but its unit moved."""
    is_leaf: bool = False
    """Nothing is below it, so that another module with equal rows looks the same."""

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        return 2.0

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        return {self.name(owner): content for owner, content in state.items()}

    def name(self, owner: Owner) -> Owner:
        """The name of an owner after the step."""
        if owner is None or (owner == "" and self.keeps_root):
            return owner
        return replace_prefix(owner, self.old, self.new)

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """Nothing is left below the old prefix, unless that is a part of the new one."""
        return owner is not None and self.name(owner) != owner and not self._is_new(owner)

    def _is_new(self, owner: str) -> bool:
        return bool(self.new) and replace_prefix(owner, self.new, "\0") != owner


@dataclass(frozen=True, kw_only=True)
class Layers(Step):
    """A list of modules is longer or shorter; what came equals its siblings."""

    order = 2
    writes = "layers"
    prefix: str
    """Of the list, with ``*`` for the numbers of lists around it: ``layers``,
    ``layers.*.experts``."""
    old: int
    """How many there were."""
    new: int
    at: int
    """From which place on layers came or went."""
    period: int = 1
    """After how many layers the same content comes again."""
    has_units: bool = True
    """Whether its modules are gathered; otherwise modules that send nothing are not seen."""

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        return 1.5

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        depth = self.prefix.count(".") + 1 if self.prefix else 0
        after: dict[Owner, Content] = {}
        more = self.new - self.old
        for owner, content in state.items():
            place = self._place(owner, depth)
            if owner is None or place is None:
                after[owner] = content
                continue
            segments = owner.split(".")
            if place < self.at:
                after[owner] = content
            elif more < 0:
                if place >= self.at - more:
                    after[_with(segments, depth, place + more)] = content
            else:
                after[_with(segments, depth, place + more)] = content
        if more > 0:
            # What comes repeats what stands before it, with the period that holds there.
            period = self.period
            for owner, content in state.items():
                place = self._place(owner, depth)
                if owner is not None and place is not None and self.at - period <= place < self.at:
                    segments = owner.split(".")
                    for new in range(place + period, self.at + more, period):
                        after[_with(segments, depth, new)] = content
        return after

    def _place(self, owner: Owner, depth: int) -> int | None:
        if owner is None:
            return None
        segments = owner.split(".")
        if len(segments) <= depth or not segments[depth].isdecimal():
            return None
        if template(".".join(segments[:depth])) != self.prefix:
            return None
        return int(segments[depth])

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """Of the layers that came, all is known; of what went, nothing is left."""
        depth = self.prefix.count(".") + 1 if self.prefix else 0
        place = self._place(owner, depth)
        return place is not None and (
            place >= self.new or self.at <= place < self.at + self.new - self.old
        )


def _with(segments: list[str], depth: int, place: int) -> str:
    return ".".join((*segments[:depth], str(place), *segments[depth + 1 :]))


class Scope(Enum):
    """What changes its count."""

    EVERYTHING = auto()
    PASSES = auto()
    """Forward, backward and recomputation."""
    UNREDUCED = auto()
    """The same without gradients of parameters."""
    UNREDUCED_OUTSIDE = auto()
    """The same, and what is outside of them."""
    FORWARD = auto()
    ACTIVATIONS = auto()
    """Activations, and the redistributions that send them."""
    OPTIMIZER = auto()
    """The optimizer's phase, with clipping."""


def in_scope(scope: Scope, fact: Fact, content: Content) -> bool:
    """Whether a fact's count changes with a scope."""
    phase = fact.row.phase
    match scope:
        case Scope.EVERYTHING:
            return True
        case Scope.OPTIMIZER:
            return phase is Phase.OPTIMIZER
        case Scope.FORWARD:
            # What is kept after forward is there for the next one.
            return phase is Phase.FORWARD and not (_is_of_unit(fact) and is_kept(content))
        case _:
            is_meant = phase in PASSES or (
                scope is Scope.UNREDUCED_OUTSIDE and phase is Phase.OUTSIDE
            )
            return is_meant and (scope is Scope.PASSES or _is_scaled(scope, fact, content))


def _is_scaled(scope: Scope, fact: Fact, content: Content) -> bool:
    if is_of_gradients(fact, content):
        return False
    is_activation = fact.role == Role.ACTIVATIONS or fact.row.subject == "redistribution"
    return is_activation if scope is Scope.ACTIVATIONS else True


def is_of_gradients(fact: Fact, content: Content) -> bool:
    """Whether a fact is about gradients of parameters: their redistributions say so by company."""
    if fact.row.subject != "redistribution" or fact.row.phase is Phase.FORWARD:
        return fact.role == Role.GRADIENTS
    beside = {other.role for other in content.facts if other.row.phase is fact.row.phase}
    return Role.GRADIENTS in beside and Role.ACTIVATIONS not in beside


def _is_of_unit(fact: Fact) -> bool:
    return fact.role == Role.PARAMETERS or fact.row.subject == "reshard"


@once
def is_kept(content: Content | None) -> bool:
    """Whether a unit is gathered in forward, and not again in backward."""
    if content is None:
        return False
    phases = {fact.row.phase for fact in content.facts if fact.role == Role.PARAMETERS}
    return Phase.FORWARD in phases and Phase.BACKWARD not in phases


@dataclass(frozen=True, kw_only=True)
class Counts(GlobalStep):
    """Everything in a scope happens n times as often."""

    order = 3
    writes = "counts"
    scope: Scope
    factor: Fraction
    has_activations: bool
    """Whether any of it is activations: without them, only gathers tell of forwards."""
    reductions: Fraction = Fraction(1)
    """How often gradients are reduced, where the scope leaves them out."""
    kept: tuple[Owner, ...] = ()
    """Units that a scope of forward leaves out, since they are kept after it for the next one."""

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        whole = self.factor.numerator == 1 or self.factor.denominator == 1
        return (2.0 if whole else 3.0) + (0.0 if self.scope is Scope.EVERYTHING else 0.5)

    def change(self, fact: Fact, count: int, content: Content) -> tuple[Fact, int]:
        """See `GlobalStep.change`."""
        if in_scope(self.scope, fact, content):
            return fact, int(count * self.factor)
        if self.reductions != 1 and fact.row.phase in PASSES and is_of_gradients(fact, content):
            return fact, int(count * self.reductions)
        return fact, count

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """Everything in its scope."""
        phase = fact.row.phase
        match self.scope:
            case Scope.EVERYTHING:
                return True
            case Scope.ACTIVATIONS:
                return fact.role == Role.ACTIVATIONS
            case Scope.FORWARD:
                return phase is Phase.FORWARD
            case Scope.OPTIMIZER:
                return phase is Phase.OPTIMIZER
            case _:
                return phase in PASSES


@dataclass(frozen=True, kw_only=True)
class ActivationSizes(GlobalStep):
    """All activations have k times the bytes."""

    order = 3
    writes = "sizes"
    factor: Fraction
    with_loss: bool = False
    """What is sent for no module outside of forward and backward too, such as a parallel loss."""

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        whole = self.factor.numerator == 1 or self.factor.denominator == 1
        return 2.0 if whole else 2.5

    def change(self, fact: Fact, count: int, content: Content) -> tuple[Fact, int]:
        """See `GlobalStep.change`."""
        if not self.is_meant(fact):
            return fact, count
        return fact.with_call(nbytes=int(fact.nbytes * self.factor)), count

    def is_meant(self, fact: Fact) -> bool:
        """Whether it changes the bytes of a fact."""
        return fact.role == Role.ACTIVATIONS or (
            self.with_loss and not fact.role and fact.row.phase is Phase.OUTSIDE
        )

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All activations."""
        return fact.row.subject == "collective" and self.is_meant(fact)


@dataclass(frozen=True, kw_only=True)
class Dtype(GlobalStep):
    """Everything of some roles on some axes has another element type, and bytes that follow it."""

    order = 3
    writes = "dtype"
    parts: frozenset[tuple[str, str]]
    """Roles, each with an axis."""
    old: str
    new: str
    factor: Fraction
    """Bytes of the new type by those of the old."""
    owners: frozenset[Owner] = frozenset()
    """Whose; empty for all."""

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        return 2.0 + 0.5 * len({template(owner or "") for owner in self.owners})

    def change(self, fact: Fact, count: int, content: Content) -> tuple[Fact, int]:
        """See `GlobalStep.change`."""
        if not self.is_meant(fact):
            return fact, count
        return fact.with_call(dtype=self.new, nbytes=int(fact.nbytes * self.factor)), count

    def is_meant(self, fact: Fact) -> bool:
        """Whether it changes the type of a fact, wherever it changes any."""
        return (fact.role, fact.row.axis) in self.parts and fact.dtype == self.old

    def includes(self, owner: Owner) -> bool:
        """See `GlobalStep.includes`."""
        return not self.owners or owner in self.owners

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All of these parts in either type."""
        is_part = (fact.role, fact.row.axis) in self.parts
        return is_part and fact.dtype in {self.old, self.new} and self.includes(owner)


@dataclass(frozen=True, kw_only=True)
class AxisSizes(GlobalStep):
    """All gradients on an axis have k times the bytes, as with another mesh."""

    order = 3
    writes = "sizes"
    axis: str
    factor: Fraction

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        return 2.5

    def is_meant(self, fact: Fact) -> bool:
        """Whether it changes the bytes of a fact."""
        return fact.role == Role.GRADIENTS and fact.row.axis == self.axis

    def change(self, fact: Fact, count: int, content: Content) -> tuple[Fact, int]:
        """See `GlobalStep.change`."""
        if not self.is_meant(fact):
            return fact, count
        return fact.with_call(nbytes=int(fact.nbytes * self.factor)), count

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All gradients on the axis."""
        return self.is_meant(fact)


@dataclass(frozen=True, kw_only=True)
class UnitSizes(Step):
    """The parameters of some units have k times the bytes, in all that is sent of them."""

    order = 4
    writes = "sizes"
    factors: Mapping[str, Mapping[str, Fraction]]
    """Of each unit, by axis."""
    nbytes: Mapping[str, tuple[int, int]]
    """Of one gather of each, before and after; 0 if there are several sizes."""

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        kinds = {(template(owner), *by.items()) for owner, by in self.factors.items()}
        return 2.0 + 0.5 * (len(kinds) - 1)

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        made: dict[tuple[object, ...], Content | None] = {}
        after = dict(state)
        for owner, by_axis in self.factors.items():
            content = state.get(owner)
            if content is None:
                continue
            key = (id(content), *by_axis.items())
            if key not in made:
                facts: Counter[Fact] = Counter()
                for fact, count in content.facts.items():
                    factor = by_axis.get(fact.row.axis, 1) if is_of_parameters(fact) else 1
                    facts[fact.with_call(nbytes=int(fact.nbytes * factor))] += count
                made[key] = pool.content(facts)
            new = made[key]
            if new is not None:
                after[owner] = new
        return after

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All parameters and gradients of these units."""
        return owner in self.factors and is_of_parameters(fact)


def is_of_parameters(fact: Fact) -> bool:
    """Whether a fact sends parameters or their gradients."""
    return fact.role in {Role.PARAMETERS, Role.GRADIENTS}


@dataclass(frozen=True, kw_only=True)
class Replaced(Step):
    """Some rows of some modules are others; subclasses say which change that is."""

    order = 5
    writes: ClassVar[Writes] = "rows"
    rows: Mapping[Owner, Mapping[RowKey, Facts]]
    """What stands in the new profile for each of these rows; empty where it has none."""
    was: Mapping[Owner, Mapping[RowKey, Facts]] = field(default_factory=dict)
    """What stood there before the step."""

    @cached_property
    def owners(self) -> tuple[Owner, ...]:
        """Whose rows they are."""
        return tuple(self.rows)

    @property
    def description_cost(self) -> float:
        """See `Step.description_cost`."""
        kinds = {(template(owner or ""), *rows) for owner, rows in self.rows.items()}
        return 2.0 + 0.5 * (len(kinds) - 1)

    def apply(self, state: State, pool: Pool) -> State:
        """The state after it."""
        after = dict(state)
        for owner, rows in self.rows.items():
            content = after.get(owner)
            facts = {
                fact: count
                for fact, count in (content.facts if content is not None else {}).items()
                if fact.row not in rows
            }
            for held in rows.values():
                facts.update(held)
            new = pool.content(facts)
            if new is None:
                after.pop(owner, None)
            else:
                after[owner] = new
        return after

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """The rows that it writes."""
        return fact.row in self.rows.get(owner, {})


class Kept(Replaced):
    """Units stay gathered after forward: as many forward gathers, and no backward gathers."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that a unit does to be gathered."""
        return owner in self.rows and _is_of_unit(fact)


class Freed(Replaced):
    """Units are freed after forward: as many forward gathers, and each again in backward."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that a unit does to be gathered."""
        return owner in self.rows and _is_of_unit(fact)


@dataclass(frozen=True, kw_only=True)
class BackwardGone(Replaced):
    """Units that are freed after forward are not gathered in backward, nor reduced after it."""

    has_reductions: bool
    """Whether their gradients were reduced; otherwise they were gathered in vain, or for others."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that a unit does to be gathered, and all gradients."""
        return owner in self.rows and (is_of_parameters(fact) or _is_of_unit(fact))


class BackwardCame(BackwardGone):
    """The other way round."""


class GatheredElsewhere(Replaced):
    """Units are gathered in backward over another axis: resharded to a part of the ranks."""


class Reduced(Replaced):
    """Gradients are reduced more or less often, for as many gathers of the same units."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All gradients of these units."""
        return owner in self.rows and fact.role == Role.GRADIENTS


@dataclass(frozen=True, kw_only=True)
class ReducedTimes(Reduced):
    """Reductions of some kinds happen n times as often."""

    times: Fraction
    kinds: tuple[str, ...]
    is_sharded: bool
    """Whether the units are gathered, as those of FSDP are."""


@dataclass(frozen=True, kw_only=True)
class ReductionGone(Reduced):
    """Gradients of units that are gathered as before are no longer reduced."""

    is_all: bool
    """Whether these units reduce nothing, in the profile that has less."""


@dataclass(frozen=True, kw_only=True)
class ReductionCame(Reduced):
    """Gradients of units that are gathered as before are reduced now."""

    is_all: bool
    """As in `ReductionGone`."""


class PartReduced(Reduced):
    """Of units that are gathered as before, another part of the gradients is reduced."""

    writes = "sizes"


class GradientSizes(Reduced):
    """Gradients of what is not gathered, as with DDP, have other bytes in as many calls."""

    writes = "sizes"


class Replicated(Replaced):
    """Units are replicated: their gathers are gone, their reduce-scatters are all-reduces."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that a unit sends of parameters."""
        return owner in self.rows and (is_of_parameters(fact) or _is_of_unit(fact))


class Sharded(Replicated):
    """The other way round."""


@dataclass(frozen=True, kw_only=True)
class SplitOff(Replaced):
    """Modules became units of their own: their bytes left the unit above."""

    units: Mapping[str, tuple[str, ...]]
    """Of each unit above, those that were a part of it."""
    others: int
    """How often other units are gathered in forward, on either side, at most; 0 if there are none.
    Not those that are kept after forward: they are gathered once for all micro-batches."""

    @property
    def modules(self) -> tuple[str, ...]:
        """All that were a part of a unit above."""
        return tuple(module for modules in self.units.values() for module in modules)

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that these units send of parameters."""
        return owner in self.rows and (is_of_parameters(fact) or _is_of_unit(fact))


def gathers_in_forward(step: Replaced, owners: Iterable[str]) -> frozenset[int]:
    """How often owners are gathered in forward after a step."""
    return frozenset(
        count_of(facts)
        for owner in owners
        for key, facts in {**step.was.get(owner, {}), **step.rows[owner]}.items()
        if key.phase is Phase.FORWARD and key.what == "all_gather" and facts
    )


def is_called_more_often(step: SplitOff) -> bool:
    """Whether what was split off is gathered more often in forward than any other unit."""
    return 0 < step.others < max(gathers_in_forward(step, step.modules), default=0)


@dataclass(frozen=True, kw_only=True)
class Merged(SplitOff):
    """Modules are no longer units: their bytes are in the unit above."""


@dataclass(frozen=True, kw_only=True)
class Called(Replaced):
    """Units are gathered in forward more or less often, and others as often as before."""

    others: int
    """How often those are gathered, at most."""
    is_pipeline: bool
    """Whether stages send to each other, whose schedules gather as they like."""
    is_more: bool
    """Whether there are more gathers than before."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that a unit does to be gathered."""
        return owner in self.rows and _is_of_unit(fact)


@dataclass(frozen=True, kw_only=True)
class RecomputeCame(Replaced):
    """Forward's collectives of modules are repeated in backward."""

    is_first: bool
    """Whether nothing is recomputed in the other profile."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that is recomputed."""
        return fact.row.phase is Phase.RECOMPUTE


class RecomputeGone(RecomputeCame):
    """Nothing is recomputed any more."""


@dataclass(frozen=True, kw_only=True)
class SequenceParallel(Replaced):
    """Forward's all-reduces of an axis are reduce-scatters of the same modules and bytes."""

    axis: str
    is_on: bool
    """Whether the new profile has it."""
    is_whole: bool
    """Whether the other profile has no such reduce-scatter at all."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that goes over the axis, and all redistributions."""
        return fact.row.axis == self.axis or fact.row.subject == "redistribution"


@dataclass(frozen=True, kw_only=True)
class AxisCame(Replaced):
    """Something is sent over an axis that was not there, such as that of tensor parallelism."""

    axis: str

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that goes over the axis, and all redistributions."""
        return fact.row.axis == self.axis or fact.row.subject == "redistribution"


class AxisGone(AxisCame):
    """Nothing is sent any more over an axis that is no longer there."""


@dataclass(frozen=True, kw_only=True)
class PhaseGone(Replaced):
    """A part of the step is no longer there, and forward is as before."""

    phases: tuple[Phase, ...]

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """These phases, and forward, which is as before."""
        return fact.row.phase in (*self.phases, Phase.FORWARD)


@dataclass(frozen=True, kw_only=True)
class PhaseCame(PhaseGone):
    """A part of the step was not there before, and forward is as before."""


@dataclass(frozen=True, kw_only=True)
class Regrouped(Replaced):
    """The same modules are gathered in other units, which have the same bytes together."""

    old: tuple[str, ...]
    new: tuple[str, ...]

    @property
    def description_cost(self) -> float:
        """More than those of other names."""
        return super().description_cost + 0.5

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """All that these units send of parameters."""
        return owner in self.rows and (is_of_parameters(fact) or _is_of_unit(fact))


class UnitRemoved(Replaced):
    """Units are neither gathered nor reduced any more, and no other unit has their bytes."""

    def claims(self, owner: Owner, fact: Fact) -> bool:
        """What it writes, and all gathers in forward, which are as before elsewhere."""
        is_gather = fact.role == Role.PARAMETERS and fact.row.phase is Phase.FORWARD
        return is_gather or super().claims(owner, fact)

    @property
    def description_cost(self) -> float:
        """More than those of steps that know where the bytes went."""
        return super().description_cost + 0.5


class UnitAdded(UnitRemoved):
    """Units are gathered and reduced that were not there, with bytes that no other unit had."""


@dataclass(frozen=True, kw_only=True)
class Redistributed(Replaced):
    """DTensors of modules change placements in a phase in which they did not, and send for it."""

    phase: Phase
    change: str
    came: bool


class GatheredInFull(Replaced):
    """DTensors are gathered whole outside of the step, for no module."""


class Buckets(Replaced):
    """The same bytes of gradients in another number of calls."""
