"""Where steps of a training script begin and end, shown by their collectives."""

import os
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_fsdp_comm import CommMode
from pytest_fsdp_comm.errors import RecordingError
from pytest_fsdp_comm.recording.script import run_script
from pytest_fsdp_comm.recording.steps import StepRecorder, record_script

pytestmark = pytest.mark.distributed(world_size=2, backend="fake")
SGD = torch.optim.SGD


def mark(number):
    """Sends `number` elements, so that sizes identify the calls."""
    dist.all_reduce(torch.ones(number, dtype=torch.uint8))


def marks(comm_mode):
    return [event.nbytes for event in comm_mode.events if event.kind == "all_reduce"]


class Net(nn.Linear):
    def __init__(self):
        super().__init__(2, 2, bias=False)

    def loss(self):
        return self(torch.ones(1, 2)).sum()


def test_step_begins_after_previous_optimizer_step(comm_mode):
    model = Net()
    optimizer = SGD(model.parameters())

    def train():
        dist.init_process_group("nccl")
        for step in range(1, 9):
            for batch in range(3):
                model.loss().backward()
                mark(10 * step + batch)
            optimizer.step()
            mark(10 * step + 9)
        dist.destroy_process_group()

    assert record_script(comm_mode, train, step=4) is model
    assert marks(comm_mode) == [39, 40, 41, 42]
    assert dist.is_initialized()
    step, evaluate = torch.amp.GradScaler.step, nn.Module.eval
    with pytest.raises(RecordingError, match=r"ended after 8 optimizer steps .* step 9 ended"):
        record_script(comm_mode, train, step=9)
    assert (torch.amp.GradScaler.step, nn.Module.eval) == (step, evaluate)
    with pytest.raises(RecordingError, match="expected steps from 3 on, such as 3 or 3-4, got 2"):
        record_script(comm_mode, train, step=2)


VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_PORT")


@pytest.mark.parametrize(
    ("size", "values"),
    [
        pytest.param(*case, marks=pytest.mark.distributed(case[0], **options))
        for *case, options in (
            (2, ["2", "2", "1", "29500"], {"backend": "gloo"}),
            (64, ["64", "8", "8", "29500"], {"simulate": True}),
        )
    ],
)
def test_script_has_torchrun_variables(comm_mode, dist_info, size, values):
    model = Net()
    optimizer = SGD(model.parameters())
    seen = []

    def train():
        seen.append([os.environ[name] for name in VARIABLES])
        assert dist.is_torchelastic_launched()
        dist.init_process_group()
        assert dist.get_world_size() == size
        for _ in range(3):
            model.loss().backward()
            optimizer.step()

    before = dict(os.environ)
    record_script(comm_mode, train)
    assert seen == [[str(dist_info.rank), *values]]
    assert dict(os.environ) == before


class LossOfLayer(nn.Module):
    """Runs a layer of the model, as torchtune's LinearCrossEntropyLoss does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        mark(1)
        return self.layer(x).sum()


@pytest.mark.parametrize("trained", ["all", "head"])
def test_loss_with_layer_of_model_is_no_model(comm_mode, trained):
    model = nn.ModuleDict({"body": nn.Linear(2, 2), "head": nn.Linear(2, 2)})
    losses = [LossOfLayer(model["head"]) for _ in range(2)]
    optimizer = SGD((model if trained == "all" else model["head"]).parameters())

    def train():
        for _ in range(3):
            x = model["body"](torch.ones(2))
            sum(loss(x) for loss in losses).backward()
            optimizer.step()

    assert record_script(comm_mode, train) is model
    assert [event.owner for event in comm_mode.events] == [None, None]


@pytest.mark.parametrize("num_optimizers", [2, 3])
def test_optimizers_that_step_together_end_one_step(comm_mode, num_optimizers):
    models = [Net() for _ in range(num_optimizers)]
    optimizers = [SGD(model.parameters()) for model in models]

    def train():
        for step in range(1, 9):
            for place, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                model.loss().backward()
                mark(10 * step + place)
                optimizer.step()

    found = record_script(comm_mode, train)
    assert [*found] == models
    assert marks(comm_mode) == [30 + place for place in range(num_optimizers)]


def recorder_of(mode, first, last):
    return StepRecorder(mode, first, last, ended=lambda: None)


def test_replacing_optimizers_end_later_steps():
    early, late = (SGD(Net().parameters()) for _ in range(2))
    mode = CommMode(trace_operations=False)
    recorder = recorder_of(mode, 6, 6)
    for step in range(1, 12):
        mark(step)
        recorder(early if step < 4 else late)
    assert len(marks(mode)) == 1
    assert recorder.is_done


def test_a_step_that_a_scaler_skips_is_none(comm_mode):
    model = Net()
    optimizer, scaler = SGD(model.parameters()), torch.amp.GradScaler("cpu")

    def train():
        for step in range(1, 9):
            loss = model.loss()
            scaler.scale(loss).backward()
            if step in {2, 4}:
                model.weight.grad.fill_(torch.inf)
            mark(step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    step = torch.amp.GradScaler.step
    # 1, 3 and 5 count; the recording of 4 was discarded.
    record_script(comm_mode, train)
    assert marks(comm_mode) == [5]
    assert torch.amp.GradScaler.step is step


@pytest.mark.parametrize(
    ("evaluated", "in_step", "is_noted"),
    [
        ("model", 3, True),
        ("model", 4, False),
        ("part", 3, False),
        ("teacher", 3, False),
    ],
)
def test_evaluation_in_recorded_step_is_noted(evaluated, in_step, is_noted):
    """Only if the trained model itself is evaluated, and not a frozen part or another model."""
    part, teacher = Net(), Net()
    model = nn.Sequential(part)
    modules = {"model": model, "part": part, "teacher": teacher}
    optimizer = SGD(model.parameters())
    recorder = recorder_of(CommMode(trace_operations=False), 3, 3)
    for step in range(1, 6):
        part.loss().backward()
        if step == in_step:
            modules[evaluated].eval()
            modules[evaluated].train()
        optimizer.step()
        recorder(optimizer)
    assert recorder.is_done
    assert recorder.has_evaluation == is_noted


def test_evaluation_in_discarded_step_is_not_noted():
    model = Net()
    optimizer = SGD(model.parameters())
    recorder = recorder_of(CommMode(trace_operations=False), 3, 3)
    for step in range(1, 6):
        model.loss().backward()
        if step == 3:
            model.eval()
        optimizer.step()
        recorder(optimizer, is_skipped=step == 3)
    assert recorder.is_done
    assert not recorder.has_evaluation


def test_a_closure_runs_in_its_step(comm_mode):
    model = Net()
    optimizer = SGD(model.parameters())

    def train():
        for step in range(1, 9):

            def closure(step=step):
                mark(step)
                loss = model.loss()
                loss.backward()
                return loss

            optimizer.step(closure)

    record_script(comm_mode, train)
    assert marks(comm_mode) == [3]


def test_optimizer_step_in_backward_raises(comm_mode):
    model = Net()
    optimizer = SGD(model.parameters())
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())

    def train():
        for _ in range(9):
            model.loss().backward()

    with pytest.raises(RecordingError, match="the optimizers step during backward"):
        record_script(comm_mode, train)


def test_an_error_of_the_script_ends_the_recording(comm_mode):
    optimizer = SGD(Net().parameters())

    def train():
        optimizer.step()
        optimizer.step()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_script(comm_mode, train)
    with comm_mode:
        mark(1)
    assert marks(comm_mode) == [1]


def test_parts_keep_names_models_get_numbers(comm_mode, device_mesh):
    def trained(*names):
        models = [nn.Sequential(OrderedDict({name: Net()})) for name in names]
        for model in models:
            fully_shard(model[0], mesh=device_mesh())
        optimizer = SGD([one for model in models for one in model.parameters()])

        def train():
            for _ in range(9):
                for model in models:
                    model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

        assert [*record_script(comm_mode, train)] == models
        return {event.owner for event in comm_mode.events}

    assert trained("a", "b") == {"a", "b"}
    assert trained("a", "a") == {"0.a", "1.a"}


def test_models_in_a_new_dict_are_named_by_it(comm_mode, device_mesh):
    """Nobody else refers to the dictionary, as in the example of recording.md."""
    actor, critic = (fully_shard(nn.Linear(1, 1), mesh=device_mesh()) for _ in range(2))
    with comm_mode(nn.ModuleDict({"actor": actor, "critic": critic})):
        critic(actor(torch.ones(1, 1))).sum().backward()
    assert {event.owner for event in comm_mode.events} == {"actor", "critic"}


def test_module_runs_with_the_working_directory_first(tmp_path, monkeypatch):
    """As after ``python -m``."""
    job = "import pathlib, sys\npathlib.Path('path').write_text(sys.path[0])"
    (tmp_path / "job.py").write_text(job)
    monkeypatch.chdir(tmp_path)
    before = [*sys.path]
    run_script("job", [], is_module=True)
    assert (tmp_path / "path").read_text() == str(Path.cwd())
    assert sys.path == before
