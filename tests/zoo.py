"""Train published models for one step on 1,024 simulated ranks.

`python tests/zoo.py` writes the table in docs/how-to/simulate.md; with names, only those rows.
"""

from __future__ import annotations

import math
import re
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from pytest_fsdp_comm import CommMode
from pytest_fsdp_comm.simulation.world import simulate_rank

RANKS, SEQUENCE = 1024, 64
BF16, FLOAT = 2, 4
FORWARD, GATHERED = ("all_gather", "forward"), ("all_gather", None)
REDUCED, CLIPPED = ("reduce_scatter", None), ("all_reduce", None)
ZOO = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
OURS = {"class", "billions", "inputs", "without_gradient"}
PAGE = Path(__file__).parents[1] / "docs" / "how-to" / "simulate.md"
START, END = "<!-- zoo -->\n\n", "\n\n<!-- end of zoo -->"
TITLES = "| model | class | parameters, B | gathered, GB | collectives |"
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def text(_):
    tokens = torch.zeros(1, SEQUENCE, dtype=torch.int64)
    return {"input_ids": tokens, "labels": tokens}


def image(config):
    size = getattr(config, "image_size", 512)
    pixels = torch.rand(1, 3, size, size)
    return {"pixel_values": pixels, "labels": torch.zeros(1, dtype=torch.int64)}


def spectrogram(config):
    """Return 30 seconds of audio, and their text."""
    features = torch.rand(1, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "labels": torch.zeros(1, 64, dtype=torch.int64)}


def waveform(_):
    """Return 4 seconds of audio at 16 kHz, and their class."""
    return {"input_values": torch.rand(1, 64000), "labels": torch.zeros(1, dtype=torch.int64)}


def captioned_image(config):
    size, length = config.vision_config.image_size, config.text_config.max_position_embeddings
    pixels, tokens = torch.rand(1, 3, size, size), torch.arange(length)[None]
    return {"input_ids": tokens, "pixel_values": pixels, "return_loss": True}


def image_and_text(config):
    vision = config.vision_config
    places = getattr(config, "mm_tokens_per_image", (vision.image_size // vision.patch_size) ** 2)
    tokens = torch.ones(1, places + SEQUENCE, dtype=torch.int64)
    tokens[:, :places] = config.image_token_id
    pixels = torch.rand(1, 3, vision.image_size, vision.image_size)
    types = (tokens != 1).long()
    return {"input_ids": tokens, "labels": tokens, "pixel_values": pixels, "token_type_ids": types}


def patches_and_text(config):
    """Return an image of 32 x 32 patches, followed by text."""
    vision = config.vision_config
    places = 32 * 32 // vision.spatial_merge_size**2
    tokens = torch.ones(1, places + SEQUENCE, dtype=torch.int64)
    tokens[:, :places] = config.image_token_id
    width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": tokens,
        "labels": tokens,
        "pixel_values": torch.rand(32 * 32, width),
        "image_grid_thw": torch.tensor([[1, 32, 32]]),
        "mm_token_type_ids": (tokens == config.image_token_id).long(),
    }


def build(name):
    import transformers

    config = {key: value for key, value in ZOO[name].items() if key not in OURS}
    kind = getattr(transformers, ZOO[name]["class"])
    model = kind(kind.config_class(**config)).train()
    model.activation_checkpointing_enable()
    return model


def units(model):
    """Return the layers that transformers checkpoints, inner ones first, and the root last."""
    from transformers.modeling_layers import GradientCheckpointingLayer as Layer

    layers = {path: m for path, m in model.named_modules() if path == "" or isinstance(m, Layer)}
    return dict(reversed(layers.items()))


def sharded_dim(parameter):
    """Return the first dim; for stacked experts, which are too few, one that the ranks divide."""
    stacked = parameter.dim() == 3
    return next((dim for dim in (1, 2) if stacked and parameter.shape[dim] % RANKS == 0), 0)


def derive(name, model):
    """Derive bytes by kind and phase (None for all phases) from the shapes of parameters."""
    unused = ZOO[name].get("without_gradient", "$^")
    sums, num_reduced, num_tensors = dict.fromkeys(units(model), 0), 0, 0
    for path, parameter in model.named_parameters():
        owner = next(unit for unit in sums if not unit or path.startswith(f"{unit}."))
        length = parameter.shape[sharded_dim(parameter)]
        numel = math.ceil(length / RANKS) * RANKS * (parameter.numel() // length)
        sums[owner] += numel
        if parameter.requires_grad and not re.search(unused, path):
            num_reduced, num_tensors = num_reduced + numel, num_tensors + 1
    forward = sum(sums.values()) * BF16
    return {
        FORWARD: forward,
        # All units but the root, which stays gathered, are gathered again in backward. A unit
        # without gradients is prefetched like the others.
        GATHERED: 2 * forward - sums[""] * BF16,
        REDUCED: num_reduced * FLOAT,
        # The norms of all gradients, in one call.
        CLIPPED: num_tensors * FLOAT,
    }


def shard(model, mesh):
    for unit in units(model).values():
        fully_shard(unit, mesh=mesh, mp_policy=POLICY, shard_placement_fn=_placement)
    return torch.optim.AdamW(model.parameters())


def _placement(parameter):
    return Shard(sharded_dim(parameter))


def train(name, model, optimizer):
    inputs = globals()[ZOO[name].get("inputs", "text")]
    model(**inputs(model.config)).loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def step(name, mesh, comm_mode):
    """Record a step; return the number of parameters, the derived bytes, and the table row."""
    model = build(name)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    derived = derive(name, model)
    optimizer = shard(model, mesh)
    with comm_mode(model):
        train(name, model, optimizer)
    cells = (
        name,
        f"`{ZOO[name]['class']}`",
        f"{num_parameters / 1e9:.3g}",
        f"{derived[GATHERED] / 1e9:,.2f}",
        f"{len(comm_mode.events)}",
    )
    return num_parameters, derived, f"| {' | '.join(cells)} |"


def rows():
    """Read the rows of the page's table, by name."""
    table = PAGE.read_text(encoding="utf-8").partition(START)[2].partition(END)[0]
    return {row.split(" | ")[0].removeprefix("| "): row for row in table.splitlines()[2:]}


def main():
    names = sys.argv[1:] or [*ZOO]
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    table_rows = rows()
    for name in names:
        started = time.process_time()
        with simulate_rank(answers=True, shares=()):
            mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
            *_, table_rows[name] = step(name, mesh, CommMode(trace_operations=False))
        print(table_rows[name], f"{time.process_time() - started:.1f} CPU s", flush=True)  # noqa: T201
    page = PAGE.read_text(encoding="utf-8")
    names = [name for name in ZOO if name in table_rows]
    table = "\n".join([TITLES, "|" + " --- |" * 5, *map(table_rows.get, names)])
    before, _, after = page.partition(START)
    PAGE.write_text(before + START + table + END + after.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
