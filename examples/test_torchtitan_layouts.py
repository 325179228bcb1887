"""Run torchtitan's code for its largest models on thousands of simulated ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from sums import BF16, FLOAT, padded
from torch.nn import functional

pytest.importorskip("torchtitan.protocols.train_spec", reason="needs torchtitan 0.2 and triton")

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.models import deepseek_v3, llama3
from torchtitan.models.moe import kernels
from torchtitan.models.moe import utils as moe_utils

pytestmark = [
    pytest.mark.large,
    # Warnings of torch about code in torchtitan.
    pytest.mark.filterwarnings(
        "ignore:DTensor random operators",
        "ignore:FSDP2-wrapped module",
        "ignore:Parallelize plan key",
    ),
]

SEQUENCE = 4096


@pytest.fixture(autouse=True)
def _without_kernels(monkeypatch):
    """Route tokens to experts on the CPU, with replacements for two functions that need a GPU."""
    histogram = torch.histc
    monkeypatch.setattr(
        torch, "histc", lambda indices, **bins: histogram(indices.float(), **bins).long()
    )
    on_cpu = partial(kernels.generate_permute_indices, use_cpu=True)
    monkeypatch.setattr(moe_utils, "generate_permute_indices", on_cpu)


def loss_of(logits, tokens):
    return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def parallelized(models, args, *, world_size, micro_batches=1, **degrees):
    """Build a model as torchtitan's trainer does; return this rank's part and the schedule."""
    config = JobConfig()
    config.training.seq_len = SEQUENCE
    config.training.local_batch_size = micro_batches
    config.activation_checkpoint.mode = "none"
    config.debug.moe_force_load_balance = True
    config.parallelism.pipeline_parallel_degree = degrees.get("pp", 1)
    config.parallelism.disable_loss_parallel = True
    args.update_from_config(config)
    none = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1)
    dims = ParallelDims(**none | degrees, dp_shard=-1, world_size=world_size)
    spec = models.get_train_spec()
    with torch.device("meta"):
        model = spec.model_cls(args)
    if dims.pp_enabled:
        device, parallelize = torch.device("cuda"), spec.parallelize_fn
        options = (model, dims, config, device, args, parallelize, loss_of)
        schedule, (part,), *_ = spec.pipelining_fn(*options)
    else:
        schedule, part = None, spec.parallelize_fn(model, dims, config)
    part.to_empty(device="cuda")
    with torch.no_grad():
        part.init_weights(buffer_device=None)
    return part, schedule


def feed_forward(width, hidden):
    return [(hidden, width), (width, hidden), (hidden, width)]


@pytest.mark.distributed(world_size=8192, simulate=True, timeout_s=900)
def test_deepseek_v3_671b(comm_mode, fsdp_tree, comm_snapshot):
    args = deepseek_v3.deepseekv3_args["671B"]
    # Flex attention and grouped GEMMs need GPU kernels. Replacing them changes no collective.
    experts = replace(args.moe_args, use_grouped_mm=False)
    args = replace(args, attn_type="sdpa", moe_args=experts)
    model, _ = parallelized(deepseek_v3, args, ep=64, world_size=8192)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64, device="cuda")
    with comm_mode(model):
        loss_of(model(tokens), tokens).backward()
        optimizer.step()

    width, of_all = args.dim, partial(padded, 8192)
    query, value = args.n_heads * (128 + 64), args.n_heads * 128
    attention = [(1536, width), (1536,), (query, 1536), (512 + 64, width), (512,)]
    attention += [(args.n_heads * (128 + 128), 512), (width, value), (width,), (width,)]
    dense = of_all(*attention, *feed_forward(width, args.inter_dim))
    shared = [(256, width), *feed_forward(width, args.moe_inter_dim)]
    layers = 3 * dense + 58 * of_all(*attention, *shared)
    table, head = of_all((args.vocab_size, width)), of_all((args.vocab_size, width), (width,))
    gathered, reduced = 2 * (layers + table) + head, layers + table + head
    assert comm_mode.nbytes("all_gather", axis="fsdp") == gathered * BF16
    assert comm_mode.nbytes("reduce_scatter", axis="fsdp") == reduced * FLOAT
    # This rank has 4 of 256 experts; 128 ranks shard their second dimension.
    expert_parameters = 58 * 4 * 3 * width * args.moe_inter_dim
    assert comm_mode.nbytes("all_gather", axis="efsdp") == 2 * expert_parameters * BF16
    assert comm_mode.nbytes("reduce_scatter", axis="efsdp") == expert_parameters * FLOAT
    # Each token goes to 8 experts and back; ranks also exchange token counts of 256 experts.
    sent = 2 * SEQUENCE * 8 * width * BF16
    assert comm_mode.nbytes("all_to_all", phase="forward") == 58 * (sent + 256 * 8)
    assert comm_mode.nbytes("all_to_all", phase="backward") == 58 * sent
    assert {"comm": comm_mode, "tree": fsdp_tree(model)} == comm_snapshot


@pytest.mark.distributed(world_size=16384, simulate=True, real={"pp": 4}, timeout_s=900)
def test_llama_3_405b(comm_mode, fsdp_tree, comm_snapshot):
    args = llama3.llama3_args["405B"]
    layout = {"tp": 8, "pp": 4, "world_size": 16384}
    part, schedule = parallelized(llama3, args, micro_batches=4, **layout)
    optimizer = torch.optim.AdamW(part.parameters())
    tokens = torch.zeros(4, SEQUENCE, dtype=torch.int64, device="cuda")
    is_first, is_last = part.tok_embeddings is not None, part.output is not None
    with comm_mode(part):
        schedule.step(*[tokens] * is_first, target=tokens if is_last else None, losses=[])
        optimizer.step()

    width, keys, hidden = args.dim, args.dim // args.n_heads * args.n_kv_heads, 53248
    of_all, num_layers = partial(padded, 512), len(part.layers)
    attention = [(width // 8, width), (keys // 8, width), (keys // 8, width), (width, width // 8)]
    layer = of_all(*attention, *feed_forward(width, hidden // 8), (width,), (width,))
    table = (args.vocab_size // 8, width)
    unit = is_first * of_all(table) + num_layers * layer + is_last * of_all(table, (width,))
    assert comm_mode.nbytes("reduce_scatter", axis="fsdp") == unit * FLOAT
    # In the first step, stages run an additional forward to exchange the shapes of activations.
    assert comm_mode.nbytes("all_gather", axis="fsdp") == 2 * unit * BF16
    scattered = 5 * (2 * num_layers + is_first) * SEQUENCE * width * BF16
    assert comm_mode.nbytes("reduce_scatter", axis="tp", phase="forward") == scattered
    assert {"comm": comm_mode, "tree": fsdp_tree(part)} == comm_snapshot
