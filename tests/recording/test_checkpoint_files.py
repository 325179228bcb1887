"""Distributed checkpoints: saved and loaded outside every phase, on any thread."""

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import Model, shard, step
from oracle import flights, last_flight, witnessed
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch_facts import needs_flight_recorder

pytestmark = [
    pytest.mark.distributed(world_size=2),
    # torch 2.9 reads the storage of each tensor that it saves.
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


@pytest.fixture
def folder(tmp_path):
    """One folder for all ranks."""
    found = [str(tmp_path)]
    dist.broadcast_object_list(found)
    return found[0]


def test_saving_and_loading_sends_objects_only(comm_mode, device_mesh, folder):
    model = shard(Model(), device_mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    step(model)
    optimizer.step()
    numbers = itertools.count()

    def save_and_load():
        number = next(numbers)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.save(states, checkpoint_id=f"{folder}/{number}")
        dcp.load(states, checkpoint_id=f"{folder}/{number}")
        set_state_dict(
            model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
        )

    # The first save plans, and the next ones reuse the plan.
    witnessed(comm_mode, model, save_and_load, warm_up=1)
    # Plans and metadata are objects; the tensors go to files.
    assert {event.source.value for event in comm_mode.events} == {"object"}
    assert {(event.phase.value, event.owner) for event in comm_mode.events} == {("outside", None)}


@pytest.mark.upstream
@needs_flight_recorder
def test_a_save_on_another_thread_is_recorded(comm_mode, device_mesh, folder):
    model = shard(Model(), device_mesh())
    group = dist.new_group(backend="gloo")

    def train_and_save():
        step(model)
        state = {"model": get_model_state_dict(model)}
        dcp.async_save(state, checkpoint_id=folder, process_group=group).result()

    since = last_flight()
    with comm_mode(model):
        train_and_save()
    saved = [event for event in comm_mode.events if event.source.value == "object"]
    assert saved
    assert {(event.phase.value, event.owner) for event in saved} == {("outside", None)}
    assert len(flights(after=since)) == len(comm_mode.events)
    assert comm_mode.recording.notes == ()
