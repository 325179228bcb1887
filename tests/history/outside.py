"""Outside forward and backward: unnecessary calls for norms, metrics and averages, and in DDP."""

import torch
import torch.distributed as dist
from history.reported import reported
from models import Decoder
from regressions.replicas import replicated, wrapped
from regressions.steps import of, train, units
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import Replicate


def normed(norm):
    """A step, and the norm of its gradients."""

    def run(model):
        train(model)
        norm([weight.grad for weight in model.parameters()])
        model.zero_grad()

    return of(units(Decoder()), run)


def of_shards(grads):
    dist.all_reduce(torch.stack([grad.to_local().square().sum() for grad in grads]).sum())


def of_whole_gradients(grads):
    nn.utils.get_total_norm(
        [grad.redistribute(placements=[Replicate()]).to_local() for grad in grads]
    )


def one_by_one(grads):
    torch.stack([grad.norm().full_tensor() for grad in grads]).norm()


GATHERED = "full_tensor() or redistribute(), by an optimizer that needs whole matrices, by clipping or by logging"


@reported(
    "huggingface/transformers/pull/46113",
    happened="To clip gradients, each rank gathered all of them.",
    cost="60 GB per rank for a 30B model, and out of memory on 80 GB.",
    first="30 modules of the model: full gradients gathered outside forward and backward: +30 calls, "
    "+34.4 KiB",
    likely=GATHERED,
    more={"all_gather": 30, "all_reduce": -1},  # 9 gradients a layer, embedding, norm, head
)
def clipping_gathers_every_gradient(changed):
    return normed(of_whole_gradients if changed else of_shards)


@reported(
    "NVIDIA-NeMo/Automodel/pull/2875",
    happened="The norm of each gradient was reduced in a separate call.",
    first="partial DTensors reduced outside forward and backward: +29 calls, +116 B",
    likely="full_tensor() or redistribute() of partial results, such as norms or sums to log",
    more={"all_reduce": 29},
)
def norms_reduced_one_by_one(changed):
    return normed(one_by_one if changed else of_shards)


@reported(
    "huggingface/trl/pull/6678",
    happened="Metrics were gathered in each step, not only in steps that log them.",
    first="(no-module) outside forward and backward: all_gather[dp] 0 -> 3 (+3), 0 -> 48 B per rank",
    more={"all_gather": 3},
)
def metrics_gathered_in_each_step(changed):
    def run(model):
        train(model)
        for metric in torch.ones(3, 1) if changed else ():
            dist.all_gather_into_tensor(torch.empty(4), metric)

    return of(units(Decoder()), run)


@reported(
    "thu-ml/Causal-Forcing/pull/20",
    "TencentARC/RollingForcing/pull/15",
    happened="Each step gathered all parameters to update their moving averages.",
    first="(root), layers.{0..1} outside forward and backward, each: all_gather[world] 0 -> 1 (+1), 4.1 KiB to 10.1 KiB per rank",
    more={"all_gather": 3},
)
def averages_of_whole_parameters(changed):
    average = {}

    def update(model):
        for name, weight in model.named_parameters():
            average.setdefault(name, torch.zeros_like(weight)).lerp_(weight.detach(), 0.1)

    def run(model):
        train(model)
        if not changed:
            update(model)
            return
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            update(model)

    return of(wrapped(use_orig_params=True), run)


def buffered(*, broadcasts, buffers=1):
    model = Decoder(2)
    for number in range(buffers):
        model.head.register_buffer(f"scale_{number}", torch.ones(16))
    return of(replicated(model, broadcast_buffers=broadcasts))


@reported(
    "ecmwf/anemoi-core/pull/1278",
    "ultralytics/ultralytics/issues/24410",
    happened="DDP broadcast all buffers in each forward, without need.",
    cost="10 % of the forward, with 16 GPUs per model.",
    first="(root) in forward: broadcast[world] 0 -> 1 (+1), 0 -> 64 B per rank",
    likely="DDP now broadcasts buffers (broadcast_buffers, or the model's buffers)",
    more={"broadcast": 1},
    gloo=2,
    neighbour=lambda: buffered(broadcasts=False, buffers=2),
)
def buffers_broadcast_in_each_forward(changed):
    return buffered(broadcasts=changed)


@reported(
    "huggingface/transformers/issues/9802",
    happened="`find_unused_parameters` was always on, also for models that use all parameters.",
    first="(root) in backward: all_reduce[world] 1 -> 2 (+1), 24.3 -> 24.4 KiB per rank",
    likely="DDP now looks for unused parameters (find_unused_parameters)",
    more={"all_reduce": 1},
    gloo=2,
)
def unused_parameters_looked_for(changed):
    return of(replicated(find_unused_parameters=changed))
