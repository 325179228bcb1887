"""Operations of symmetric memory, whose kernels need CUDA: here with others."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory  # it defines operations
from torch import nn

ROWS, WIDTH, RANKS = 4, 8, 2
NBYTES = 4 * (ROWS * WIDTH + WIDTH * WIDTH)
OPS = torch.ops.symm_mem

KERNELS = {
    "fused_all_gather_matmul": lambda x, weights, *_: (x, [x @ weight for weight in weights]),
    "get_remote_tensors": lambda tensor, _group: [tensor],
}


@pytest.fixture(scope="module", autouse=True)
def kernels():
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name, kernel in KERNELS.items():
        library.impl(name, kernel)
    yield
    library._destroy()


@pytest.mark.distributed(RANKS)
def test_fused_operation_is_recorded_once(comm_mode):
    group = dist.group.WORLD.group_name

    class Columns(nn.Linear):
        def forward(self, x):
            OPS.get_remote_tensors(x, group)
            return OPS.fused_all_gather_matmul(x, [self.weight.t()], 0, group)[1][0]

    model = nn.Sequential(Columns(WIDTH, WIDTH))
    with comm_mode(model), torch.no_grad():
        model(torch.ones(ROWS, WIDTH))
    (event,) = comm_mode.events
    assert (event.kind, event.axis) == ("unknown:fused_all_gather_matmul", "world")
    assert (event.nbytes, event.owner, event.role) == (NBYTES, "0", "activations")
