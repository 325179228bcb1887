"""The names that the recorder imports from torch's private modules."""

from typing import Final

from pytest_fsdp_comm import upstream

READER: Final = "a class or module that comm_mode reads"
"""The reader of all private names that a recording uses, for `upstream.private_names`."""

with upstream.private_names(READER):
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["READER", "FakeTensor", "FunctionalTensor", "OpOverload", "TorchDispatchMode"]
