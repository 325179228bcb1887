"""Changes of a step whose stages run on different ranks: of the first one, or of all."""

import torch
import torch.distributed as dist
from models import WIDTH, Block
from regressions.table import TABLE, mesh
from torch import nn
from torch.distributed import pipelining
from torch.distributed.fsdp import fully_shard

regression, innocent = TABLE.regression, TABLE.innocent

BATCH = 2


def linear():
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Part(nn.Module):
    """The layers of one stage; the first embeds as well."""

    def __init__(self, number, axes, layers=2, *, is_unit=True, **options):
        super().__init__()
        if number == 0:
            self.embed = linear()
        self.layers = nn.ModuleDict({str(number * layers + n): Block() for n in range(layers)})
        if axes is not None:
            for layer in self.layers.values():
                fully_shard(layer, mesh=axes, **options)
            if is_unit:
                fully_shard(self, mesh=axes)

    def forward(self, x):
        if hasattr(self, "embed"):
            x = self.embed(x)
        for layer in self.layers.values():
            x = layer(x)
        return x


class Stage(pipelining.PipelineStage):
    """A stage whose shapes are known: with simulated ranks it cannot ask the others for theirs."""

    def _warmup_backward_result(self, **_):
        return torch.ones(1, dtype=torch.int32)


def pipeline(
    schedule="Schedule1F1B",
    *,
    micro_batches=4,
    batch=BATCH,
    stages=2,
    dtype=torch.float32,
    axes=None,
    sharded=True,
    **options,
):
    """The stages of this rank, and a step of torch's schedule.

    Args:
        schedule: Its name.
        micro_batches: In one step.
        batch: Of each of them.
        stages: Of the whole model.
        dtype: Of parameters and activations.
        axes: The mesh; None for 2 by 2 ranks.
        sharded: Whether stages are FSDP units.
        options: As for `Part`.
    """
    axes = axes or mesh(pp=2, dp=2)
    group = axes["pp"].get_group()
    numbers = range(dist.get_rank(group), stages, axes["pp"].size())
    parts = [
        Part(number, axes["dp"] if sharded else None, **options).to(dtype) for number in numbers
    ]
    example = torch.ones(batch, WIDTH, dtype=dtype, requires_grad=True)
    made = [
        Stage(
            part,
            number,
            stages,
            torch.device("cpu"),
            input_args=(example if number else example.detach(),),
            output_args=(example,),
            group=group,
        )
        for part, number in zip(parts, numbers, strict=True)
    ]
    runs = getattr(pipelining, schedule)(
        made if stages > axes["pp"].size() else made[0],
        micro_batches,
        loss_fn=lambda output, target: (output - target).pow(2).sum(),
    )
    whole = torch.ones(batch * micro_batches, WIDTH, dtype=dtype)
    given = [whole] if 0 in numbers else []
    target = {"target": whole} if stages - 1 in numbers else {}
    return parts, lambda: runs.step(*given, **target)


@innocent(is_reversible=True)
def pipeline_micro_batches_doubled(changed):
    return pipeline(micro_batches=8 if changed else 4)


@innocent(is_reversible=True)
def pipeline_batch_doubled(changed):
    return pipeline(batch=4 if changed else 2)


@innocent(is_reversible=True)
def pipeline_smaller_and_more_micro_batches(changed):
    return pipeline(micro_batches=8, batch=1) if changed else pipeline(micro_batches=4, batch=2)


@innocent(is_reversible=True)
def pipeline_more_layers_a_stage(changed):
    return pipeline(layers=3 if changed else 2)


@innocent(is_reversible=True)
def pipeline_forwards_first(changed):
    return pipeline("ScheduleGPipe" if changed else "Schedule1F1B")


@innocent(is_reversible=True)
def pipeline_interleaved(changed):
    if changed:
        return pipeline("ScheduleInterleaved1F1B", stages=4, layers=1)
    return pipeline("Schedule1F1B", stages=2, layers=2)


@innocent(is_reversible=True)
def pipeline_interleaved_breadth_first(changed):
    name = "ScheduleLoopedBFS" if changed else "ScheduleInterleaved1F1B"
    return pipeline(name, stages=4, layers=1)


@innocent(is_reversible=True)
def pipeline_in_bfloat16(changed):
    return pipeline(dtype=torch.bfloat16 if changed else torch.float32)


@regression(is_reversible=True)
def pipeline_layers_kept_after_forward(changed):
    return pipeline(reshard_after_forward=not changed)


@regression(is_reversible=True)
def pipeline_is_not_sharded(changed):
    return pipeline(sharded=not changed)


@innocent(worlds=(4, 8), is_reversible=True)
def pipeline_twice_the_stages(changed):
    return pipeline(axes=mesh(pp=4 if changed else 2, dp=2), stages=4 if changed else 2, layers=1)


@innocent(worlds=(4, 8), is_reversible=True)
def pipeline_twice_the_ranks_a_stage(changed):
    return pipeline(axes=mesh(pp=2, dp=4 if changed else 2))


# All stages.


@innocent(gloo=4, is_reversible=True)
def pipeline_of_all_ranks_micro_batches_doubled(changed):
    return pipeline(micro_batches=8 if changed else 4)


@innocent(gloo=4, is_reversible=True)
def pipeline_of_all_ranks_more_layers_a_stage(changed):
    return pipeline(layers=3 if changed else 2)


@regression(gloo=4, is_reversible=True)
def pipeline_of_all_ranks_layers_kept_after_forward(changed):
    return pipeline(reshard_after_forward=not changed)


# By hand.


def by_hand(*, sends=1, micro_batches=2, to=1, in_halves=False, is_async=False, objects=False):
    """The first stage, which sends its output and receives the gradient of it."""
    stage, axes = nn.Sequential(Block(), Block()), mesh(pp=4, dp=2)
    for unit in (*stage, stage):
        fully_shard(unit, mesh=axes["dp"])
    group = axes["pp"].get_group()

    def send(output):
        for piece in output.detach().chunk(2 if in_halves else 1):
            if is_async:
                dist.isend(piece, group=group, group_dst=to).wait()
            else:
                dist.send(piece, group=group, group_dst=to)

    def run():
        for _ in range(micro_batches):
            output = stage(torch.ones(BATCH, WIDTH))
            for _ in range(sends):
                send(output)
            gradient = torch.empty_like(output)
            dist.recv(gradient, group=group, group_src=to)
            output.backward(gradient)
        if objects:
            dist.broadcast_object_list([None], src=0)

    return stage, run


@regression(worlds=(8, 8), is_reversible=True)
def activations_sent_twice(changed):
    return by_hand(sends=1 + changed)


@regression(worlds=(8, 8), is_reversible=True)
def activations_sent_in_halves(changed):
    return by_hand(in_halves=changed)


@regression(worlds=(8, 8), is_reversible=True)
def activations_sent_to_another_stage(changed):
    return by_hand(to=2 if changed else 1)


@innocent(worlds=(8, 8), is_silent=True)
def activations_sent_asynchronously(changed):
    return by_hand(is_async=changed)


@innocent(worlds=(8, 8), is_reversible=True)
def activations_of_twice_the_micro_batches(changed):
    return by_hand(micro_batches=4 if changed else 2)


@regression(worlds=(8, 8))
def objects_broadcast_in_each_step(changed):
    return by_hand(objects=changed)
