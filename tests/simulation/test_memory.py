"""Memory that a simulated tensor does not have: its address, its threads, its files."""

import ctypes
import io
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn
from torch.utils.data import DataLoader

from pytest_fsdp_comm.ranks.wire.load import extend_under_load
from pytest_fsdp_comm.simulation.values import SimulatedTensors, SimulationError

simulated = pytest.mark.distributed(world_size=4, simulate=True)


@simulated
def test_address_is_unique_to_the_storage():
    own = torch.rand(4, 2)
    start = own.data_ptr()
    assert own.detach().data_ptr() == own.T.data_ptr() == start
    assert own[1].data_ptr() - start == 2 * own.element_size()
    assert own[1].untyped_storage().data_ptr() == start
    kept = [own.clone() for _ in range(99)]
    kept += [own.data, nn.Parameter(own), own.to("cuda")]
    assert len({each.data_ptr() for each in kept}) == 101
    assert own.data_ptr() == start
    assert torch.tensor(start).item() == start
    assert [own[4:].data_ptr(), torch.empty(0).untyped_storage().data_ptr()] == [0, 0]
    assert torch.empty(3, device="meta").data_ptr() == 0
    own.untyped_storage().resize_(0)
    assert own.untyped_storage().data_ptr() == 0


def pointer(own):
    return ctypes.cast(own.data_ptr(), ctypes.POINTER(ctypes.c_float))


READS = [
    pointer,
    lambda own: ctypes.string_at(own.data_ptr(), 4),
    lambda own: ctypes.memmove(own.data_ptr(), b"0000", 4),
    lambda own: own.untyped_storage().tolist(),
    lambda own: own.untyped_storage()[0],
    lambda own: np.from_dlpack(own[1:]),
    lambda own: torch.utils.dlpack.to_dlpack(own[1:]),
    lambda own: torch.save(own, io.BytesIO()),
    lambda own: pickle.dumps(own.untyped_storage()),
    lambda own: safetensors.torch.save({"weight": own}),
]


@simulated
def test_reading_memory_is_refused_with_its_line():
    for read in READS:
        with pytest.raises(SimulationError) as refused:
            read(torch.rand(3))
        text = str(refused.value)
        line = read.__code__.co_firstlineno + (read is pointer)
        assert f"test_memory.py:{line} reads the memory of a tensor" in text
    assert np.from_dlpack(torch.arange(3)).tolist() == [0, 1, 2]
    text = ctypes.create_string_buffer(b"text")
    assert ctypes.string_at(ctypes.addressof(text)) == b"text"
    assert torch.rand(3).share_memory_().shape == (3,)


FILE = safetensors.torch.save({"weight": torch.ones(3, 4), "step": torch.tensor([7])})


def test_memory_read_in_cpp_is_explained(pytester):
    pytester.makepyfile(
        """
        import pytest, torch
        from torch.nn.utils.rnn import pack_padded_sequence

        pytestmark = pytest.mark.distributed(world_size=4, simulate=True)

        def test_packed():
            packed = pack_padded_sequence(torch.rand(5, 2, 4), torch.tensor([5, 3]))
            torch.nn.LSTM(4, 4)(packed)

        def test_made_of_tensors():
            torch.LongTensor([torch.tensor(3)])

        def test_another_error():
            raise RuntimeError("no memory")
        """
    )
    result = pytester.runpytest_inprocess("-q")
    result.assert_outcomes(failed=3)
    said = result.stdout.str()
    assert said.count("fsdp-comm: C++ code ") == 2
    assert "read the memory of a simulated tensor, which has none: avoid that call" in said


@simulated
def test_safetensors_are_loaded(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(FILE)
    state = safetensors.torch.load_file(path)
    model = nn.Linear(4, 3, bias=False)
    model.load_state_dict(state, strict=False)
    assert model(torch.rand(2, 4)).shape == (2, 3)
    assert state["step"].item() == 7
    with safetensors.safe_open(path, "pt") as file:
        assert file.get_slice("weight")[:2].shape == (2, 4)


class StatefulLoader(DataLoader):
    """Iterates itself, as the loader of torchdata does."""

    def __iter__(self):
        assert self.num_workers == 0
        return self._get_iterator()

    def state_dict(self):
        assert self.num_workers == 0
        return {"next": next(self._get_iterator())}


@simulated
def test_loaders_of_others_start_no_worker():
    loader = StatefulLoader(torch.arange(4), 2, num_workers=1, pin_memory=True)
    # If it pinned memory, torch would warn, and the suite turns warnings into errors.
    assert loader.state_dict()["next"].tolist() == [0, 1]
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert (loader.num_workers, loader.pin_memory) == (1, True)


@simulated
def test_a_cpu_with_a_number_is_the_cpu():
    own, place = torch.rand(3), torch.device("cpu", 0)
    for made in (own.to(place), torch.ones(3, device="cpu:0"), own.new_empty(3, device=place)):
        assert (made + own).device == torch.device("cpu")
    assert nn.Linear(3, 3, device=place).to("cpu:0")(own).device.index is None


@simulated
def test_threads_simulate_as_the_test_does():
    sys.setswitchinterval(1e-5)
    own, positions = torch.rand(16, 16), torch.arange(6)

    def train(number):
        model = nn.Linear(16, 16)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(5):
            model(own * number).relu().sum().backward()
            optimizer.step()
            assert (positions + number).sum().item() == 15 + 6 * number
            assert torch.zeros(2**45).device == own.device  # it would not fit into memory
        return model.weight

    class Loader(threading.Thread):
        def run(self):
            self.loaded = torch.zeros(2**45)

    loader = Loader()
    loader.start()
    with ThreadPoolExecutor(4) as pool:
        trained = [pool.submit(train, number) for number in range(8)]
        for size in range(1, 200):
            assert (own[:, : size % 16] @ own[: size % 16]).device == own.device
        assert len({each.result().data_ptr() for each in trained}) == 8
    loader.join()
    assert loader.loaded.shape == (2**45,)


@simulated
def test_an_operator_without_sizes_is_refused():
    with torch.library._scoped_library("fsdp_comm_test", "FRAGMENT") as library:
        library.define("double(Tensor x) -> Tensor")
        library.impl("double", lambda x: x * 2, "CPU")
        with pytest.raises(SimulationError) as refused:
            torch.ops.fsdp_comm_test.double(torch.rand(2))
    text = str(refused.value)
    assert "test_memory.py:" in text
    assert "calls fsdp_comm_test.double, which has no fake implementation" in text
    assert "torch.library.register_fake" in text


def test_threads_leave_only_what_they_entered():
    mode, is_entered, may_leave = (
        SimulatedTensors(assumes=True),
        threading.Event(),
        threading.Event(),
    )

    def enter():
        with mode:
            is_entered.set()
            may_leave.wait(extend_under_load(10))

    with mode:
        thread = threading.Thread(target=enter)
        thread.start()
        is_entered.wait(extend_under_load(10))
        with mode:
            may_leave.set()
            thread.join()
        assert torch.zeros(2**45).shape == (2**45,)
    assert type(torch.zeros(1)) is torch.Tensor
