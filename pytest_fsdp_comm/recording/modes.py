"""A dispatch mode, for what no kernel can see: every operation, or any where torch has moved."""

# Note [Subclasses pass through]
# A mode sees an operation before a tensor subclass does, and would see what the subclass then does
# otherwise. So DTensor and other wrappers are let through (NotImplemented): what they make of the
# operation comes back here on the tensors that they hold. A class with code of its own that nobody
# can take apart is let through too, but a collective that it is given is taken as it is.

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils._python_dispatch import TorchDispatchMode

from pytest_fsdp_comm.recording.kernels import run_recorded
from pytest_fsdp_comm.recording.operations import NAMESPACES
from pytest_fsdp_comm.recording.subclasses import Dispatch, Subclasses, is_dtensor_class

if TYPE_CHECKING:
    from collections.abc import Iterable

    from pytest_fsdp_comm.recording.module_trace import ModuleTracer
    from pytest_fsdp_comm.recording.operations import Call


class WatchingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """See every operation of this thread below autograd. See Note [Subclasses pass through]."""

    # Without it a higher-order operator in the block raises.
    supports_higher_order_operators = True

    def __init__(
        self,
        tracer: ModuleTracer | None,
        calls: Iterable[Call] = (),
    ) -> None:
        """Trace each operation, and have those of `calls` recorded."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._tracer = tracer
        # By identity: torch's operations hash slowly.
        self._calls = {id(call.func): call for call in calls}
        self._subclasses = Subclasses()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep torch.compile on under this mode (torch 2.9.1 and newer)."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Trace, record, and run."""
        given = kwargs or {}
        call = self._calls.get(id(func))
        dispatch = max(map(self._subclasses.__getitem__, types), default=Dispatch.NONE)
        if dispatch is Dispatch.WRAPPER:
            if self._tracer is not None and any(map(is_dtensor_class, types)):
                self._tracer.note(func, args)
            return NotImplemented
        if dispatch is Dispatch.OPAQUE and getattr(func, "namespace", None) not in NAMESPACES:
            return NotImplemented
        if self._tracer is not None:
            self._tracer.note(func)
        if call is None:
            return func(*args, **given)
        return run_recorded(call, args, given, partial(func, *args, **given))
