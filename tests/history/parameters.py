"""Parameters: gathers that are too frequent, late or large, and changes of size or dtype."""

from contextlib import ExitStack, nullcontext
from unittest.mock import patch

import torch
from history.gradients import Headless
from history.reported import reported
from models import Decoder
from regressions.frameworks import adapted
from regressions.fsdp import prefetching
from regressions.replicas import wrapped
from regressions.steps import accumulate, of, tokens, train, units
from regressions.table import mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint


def chunked(*, gather_each, chunks=4):
    """A loss that works on the head's weight itself, in parts that are recomputed."""
    model = units(Headless(2), root=True)

    def loss(part, labels, weight):
        weight = weight.full_tensor() if gather_each else weight
        return cross_entropy((part @ weight.t()).flatten(0, 1), labels.flatten())

    def run():
        hidden, weight = model(tokens()), model.head.weight
        weight = weight if gather_each else weight.full_tensor()
        parts = zip(hidden.chunk(chunks, dim=1), tokens().chunk(chunks, dim=1), strict=True)
        sum(checkpoint(loss, *part, weight, use_reentrant=False) for part in parts).backward()

    return model, run


@reported(
    "huggingface/trl/pull/6530",
    happened="A chunked loss used `lm_head.weight` outside the forward of the head. Each chunk, "
    "and each recomputation of a chunk, gathered it. A review found this.",
    first="head: full parameters gathered outside forward and backward: +3 calls, +6.0 KiB",
    likely="full_tensor() or redistribute(), a full state dict (e.g. for a checkpoint), or a DTensor that is printed or logged",
    more={"all_gather": 7},  # 4 chunks and 4 recomputations in place of 1
    neighbour=lambda: chunked(gather_each=False, chunks=8),
)
def head_gathered_for_each_chunk(changed):
    return chunked(gather_each=changed)


@reported(
    "allenai/OLMo-core/pull/194",
    "pytorch/pytorch/pull/137922",
    happened="The embedding was gathered in backward, which does not need its weight.",
    first="embed now gathered in backward: 1 call of 2.0 KiB",
    likely="set_unshard_in_backward(False) is no longer called on the unit; the call saves this gather if backward does not need the weight, e.g. of an embedding",
    more={"all_gather": 1},
)
def embedding_gathered_in_backward(changed):
    model = units(Decoder(), "embed")
    model.embed.set_unshard_in_backward(unshard_in_backward=changed)
    return of(model)


class Looped(Decoder):
    """Its layers run twice: backward frees what the recomputation of the first time needs."""

    def forward(self, given):
        x = self.embed(given)
        for layer in (*self.layers, *self.layers):
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


def looped(*, frees, reentrant=False):
    model = units(Looped(2, reentrant=reentrant), reshard_after_forward=False)
    model.set_reshard_after_backward(frees)

    def run():
        train(model)
        for module in (model, *model.layers):
            module.reshard()

    return model, run


@reported(
    "Robbyant/lingbot-vla/pull/50",
    happened="Parameters stayed unsharded after forward, as in ZeRO-2, but were resharded after "
    "the first backward through them. Recomputation gathered them again.",
    cost="21 % more throughput without that.",
    first="layers.{0..1} in backward, each: all_gather[dp] 0 -> 1 (+1), 0 -> 10.1 KiB per rank",
    more={"all_gather": 2},
    neighbour=lambda: looped(frees=False, reentrant=None),
)
def freed_after_each_backward(changed):
    return looped(frees=changed)


def nested(*, reentrant):
    inner = [f"layers.{n}.{part}" for n in range(2) for part in ("attention", "mlp")]
    return units(Decoder(2, reentrant=reentrant), *inner)


def freeing_what_is_recomputed():
    """Has FSDP2 free a unit after the forward of a recomputation too, as torch did before."""
    group, is_backward = _fsdp_param_group.FSDPParamGroup, _fsdp_param_group.is_bw
    record = group._record_post_forward
    patches = ExitStack()
    patches.enter_context(patch.object(_fsdp_param_group, "is_bw", lambda: False))
    patches.enter_context(
        patch.object(
            group, "_record_post_forward", lambda self: None if is_backward() else record(self)
        )
    )
    return patches


@reported(
    "pytorch/pytorch/pull/175406",
    happened="Recomputed layers resharded the units below them, and backward gathered these again.",
    first="layers.{0..1}.attention in backward, each: all_gather[dp] 1 -> 2 (+1), 4.0 -> 8.0 KiB per rank",
    more={"all_gather": 2},
    neighbour=lambda: of(nested(reentrant=None)),
)
def units_below_a_recomputed_layer(changed):
    model = nested(reentrant=False)

    def run():
        with freeing_what_is_recomputed() if changed else nullcontext():
            train(model)

    return model, run


GATHERED_TWICE = (
    "reentrant checkpointing gathers the units a second time (if it wraps FSDP1's units, or after "
    "set_modules_to_forward_prefetch): pass use_reentrant=False"
)


@reported(
    "NVIDIA-NeMo/Automodel/issues/3373",
    happened="Reentrant checkpointing ran layers like a second forward, and each prefetched the "
    "next layer again.",
    first="recomputation now repeats the forward collectives of layers.{1..3}: 3 calls, 30.4 KiB in total",
    likely=GATHERED_TWICE,
    more={"all_gather": 3},
    neighbour=lambda: of(prefetching(units(Decoder(4)), 1)),
)
def prefetches_repeated_by_recomputation(changed):
    return of(prefetching(units(Decoder(4, reentrant=changed)), 1))


@reported(
    "pytorch/pytorch/issues/105635",
    "huggingface/transformers/issues/30404",
    "verl-project/verl/pull/114",
    happened="Reentrant checkpointing under FSDP1 gathered each layer twice in backward.",
    first="recomputation now repeats the forward collectives of layers.{0..2}: 3 calls, 30.4 KiB in total",
    likely=GATHERED_TWICE,
    more={"all_gather": 3},
    neighbour=lambda: of(wrapped(Decoder(3))),
)
def fsdp1_gathers_twice_in_backward(changed):
    return of(wrapped(Decoder(3, reentrant=changed)))


@reported(
    "NVIDIA-NeMo/RL/pull/464",
    "pytorch/pytorch/pull/154704",
    "huggingface/accelerate/pull/4015",
    happened="Newer torch reshards a root after forward if `reshard_after_forward` says so; older "
    "torch did not. Norm and head were resharded just before their backward.",
    first="(root) now resharded after forward and gathered again in backward: +1 call, +4.1 KiB",
    likely="reshard_after_forward False -> True, as the tree shows",
    tree="(root): reshard_after_forward False -> True",
    more={"all_gather": 1},
)
def head_freed_before_its_backward(changed):
    return of(units(Decoder(), root=changed))


@reported(
    "Tencent-Hunyuan/UniRL/pull/321",
    "allenai/molmoact2/issues/35",
    happened="To train adapters, each micro-batch gathered a frozen backbone that fits into "
    "memory.",
    first="layers.{0..1} sharded instead of replicated: parameters gathered, gradients reduce-scattered",
    tree="mesh axes in use: replicate=4 stride 1, shard=1 -> dp=4 stride 1",
    # 3 units in forward and 2 in backward, for each of 4 micro-batches.
    more={"all_gather": 20, "reduce_scatter": 2, "all_reduce": -2},
)
def frozen_backbone_gathered_for_each_micro_batch(changed):
    axes = mesh(dp=4) if changed else mesh(replicate=4, shard=1)
    return of(units(adapted(), axes=axes), accumulate, micro_batches=4)


@reported(
    "sgl-project/SpecForge/pull/566",
    happened="The whole model was one unit, so no communication overlapped with computation.",
    cost="0.99 s per step instead of 0.92 s, on 8 GPUs.",
    first="layers.{0..2} merged into unit (root)",
    tree="layers.{0..2}: is no longer a unit (fsdp2)",
    more={"all_gather": -6, "reduce_scatter": -3},
)
def one_unit_for_all(changed):
    return of(units(Decoder(), layers=not changed))


@reported(
    "NVIDIA-NeMo/Automodel/pull/3708",
    happened="The root unit contained embedding and head, and its gradients are reduced in one "
    "call.",
    cost="A buffer of 9.5 GiB for a 27B model, whose backward failed on 64 H100.",
    first="embed, head merged into unit (root)",
    tree="embed, head: is no longer a unit (fsdp2)",
    more={"all_gather": -4, "reduce_scatter": -2},
)
def embedding_and_head_in_one_unit(changed):
    return of(units(Decoder(), *[] if changed else ["embed", "head"]))


@reported(
    "areal-project/AReaL/pull/834",
    "pytorch/torchtitan/pull/1594",
    happened="With expert parallelism, the host waits for the router. Without prefetching, it "
    "issued the next gather only after that.",
    first="layers.{1..3} in forward: all_gather[dp] no longer prefetched (1 -> 0 units ahead of use)",
    likely="less forward prefetching (set_modules_to_forward_prefetch; FSDP1: forward_prefetch)",
    tree="layers.{0..2}: forward_prefetch 1 unit -> 0 units",
)
def no_prefetching(changed):
    return of(prefetching(units(Decoder(4)), 0 if changed else 1))


@reported(
    "NVIDIA-NeMo/Automodel/pull/2213",
    "verl-project/verl/issues/7834",
    happened="After construction on the meta device, head and embedding got separate tensors, and "
    "nothing tied them again.",
    first="unit sizes changed: (root) 2.1 -> 4.1 KiB per gather",
    tree="embed.weight: tied with head.weight -> not tied",
)
def tied_weights_came_apart(changed):
    with torch.device("meta"):
        model = Decoder(tied=True)
    model.to_empty(device="cpu")
    if not changed:
        model.head.weight = model.embed.weight
    return of(units(model))


@reported(
    "huggingface/accelerate/issues/3979",
    happened="Since 1.13.0, parameters were no longer cast to float32 before sharding, so "
    "optimizers worked in bfloat16.",
    tree="30 parameters of the model: dtype float32 -> bfloat16",
    is_silent=True,
)
def master_weights_in_bfloat16(changed):
    model = Decoder().to(torch.bfloat16 if changed else torch.float32)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    return of(units(model, mp_policy=policy))
