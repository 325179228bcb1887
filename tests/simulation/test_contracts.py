"""The private names of torch that a simulation replaces or reads: fails when one moves."""

import ast
import inspect
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import _meta_registrations, nn
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_init, _fsdp_param, _fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention import flex_attention
from torch.utils.data import DataLoader

from pytest_fsdp_comm.simulation import devices, memory, process_groups, sharding

pytestmark = pytest.mark.upstream


def parameters(function):
    return [*inspect.signature(inspect.unwrap(function)).parameters]


def check_devices():
    assert torch._C._nn._parse_to("cpu", torch.float16)[:2] == (torch.device("cpu"), torch.float16)
    assert "torch._C._nn._parse_to" in inspect.getsource(nn.Module.to)
    assert isinstance(vars(FakeTensor)["device"], property)
    assert "device" not in vars(DTensor)
    moving = [
        each for each in (_fsdp_init, _fully_shard) if "_move_states" in inspect.getsource(each)
    ]
    assert moving
    for module in moving:
        assert parameters(module._move_states_to_device)[:3] == ["params", "buffers", "device"]
    assert parameters(DeviceMesh.__init__)[:3] == ["self", "device_type", "mesh"]
    assert "device_type" in vars(DeviceMesh) or "self.device_type =" in inspect.getsource(
        DeviceMesh
    )
    assert parameters(torch.autocast.__init__)[:4] == ["self", "device_type", "dtype", "enabled"]
    autocast = ("is_autocast_enabled", "set_autocast_enabled", "get_autocast_dtype")
    for name in (*autocast, "set_autocast_dtype", "get_device_module"):
        assert callable(getattr(torch, name)), name
    places = (torch.cuda, torch.cuda.memory, torch.cuda.profiler, torch.accelerator)
    for name in (*devices._IDLE, *devices._NOTHING, *devices._ZERO):
        # torch 2.7 has no device_index.
        assert name == "device_index" or any(hasattr(place, name) for place in places), name
    assert parameters(flex_attention._validate_device)[0] == "query"
    hop = inspect.getsource(flex_attention.flex_attention)
    assert "flex_attention_hop(\n" in hop or "flex_attention_hop(*args" in hop
    assert "_validate_device(query, key, value)" in hop


def check_world():
    assert hasattr(_fsdp_param, sharding._CHUNKS)
    assert parameters(_fsdp_param._chunk_with_empty) == ["tensor", "num_chunks", "dim"]
    assert f"{sharding._CHUNKS}(" in inspect.getsource(_fsdp_param.FSDPParam)
    given = [parameters(getattr(distributed_c10d, name)) for name in process_groups._OBJECTS]
    assert [each[:3] for each in given] == [
        ["obj", "device", "group"],
        ["tensor", "tensor_size", "group"],
    ]
    assert all(each[3:] in ([], ["weights_only"]) for each in given)  # since torch 2.15
    for name in process_groups._GATHERS:
        source = inspect.getsource(inspect.unwrap(getattr(distributed_c10d, name)))
        assert all(f" {converts}(" in source for converts in process_groups._OBJECTS), name
    assert distributed_c10d.GroupMember.WORLD is None
    assert vars(torch.jit._state._enabled).keys() == {"enabled"}
    assert "_enabled" in inspect.getsource(torch.jit._script)
    # It numbers the works of collectives on meta tensors; torch 2.9 has no kernels for these.
    if registrations := sys.modules.get("torch.distributed._meta_registrations"):
        assert callable(registrations.generate_unique_id)
    if hasattr(_meta_registrations, "meta_grouped_mm"):  # not in torch 2.7
        check_grouped_product()
    make = parameters(distributed_c10d._new_process_group_helper)
    assert make[3] == "backend"
    assert {*make} >= {*process_groups._FAKE_OPTIONS}
    assert isinstance(OPDEFS, Mapping)
    assert "self._init_fn(*args, **kwargs)" in inspect.getsource(CustomOpDef)


def check_grouped_product():
    sizes = inspect.getsource(_meta_registrations.meta_grouped_mm)
    assert (
        f"return {sharding._GROUPED}(\n        mat_a,\n        mat_b,\n        scale_a=None"
        in sizes
    )
    assert parameters(_meta_registrations._create_grouped_mm_output_tensor)[2:] == [
        "offs",
        "out_dtype",
    ]


def check_conversions():
    with FakeTensorMode() as mode:
        own = torch.ones(2)
    assert own.constant is None
    # Attributes of a mode that threads would share.
    assert not mode.in_kernel_invocation
    assert mode.enter_stack == []
    memo = mode.fake_tensor_converter.meta_converter.tensor_memo
    memo.clear()  # since torch 2.15 it has what the mode has made
    assert len(memo) == 0
    loader = vars(DataLoader([1], num_workers=1, timeout=3, pin_memory=True))
    assert [loader[name] for name in ("num_workers", "timeout", "pin_memory")] == [1, 3, True]


def test_replaced_functions_are_what_torch_calls():
    check_devices()
    check_world()
    check_conversions()


def test_errors_of_scripts_do_not_speak_of_tests():
    texts = set()
    for path in Path(memory.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            literals = [part.value for part in parts if isinstance(part, ast.Constant)]
            texts.add("".join(text for text in literals if isinstance(text, str)))
    texts -= {*memory._IN_SCRIPTS}
    for in_test in memory._IN_SCRIPTS:
        assert [text for text in texts if in_test in text], in_test
    errors = [text for text in texts if any(in_test in text for in_test in memory._IN_SCRIPTS)]
    for text in errors:
        # A script is always simulated as with simulate=True, so these texts are only for tests.
        if "simulate=True" not in text:
            in_script = memory.adapt_to_script(text)
            assert not [word for word in ("simulate=", "the test", "real=") if word in in_script]


def test_missing_name_fails_only_tests_that_use_it(pytester):
    pytester.makepyfile(
        """
        import pytest
        import torch

        pytestmark = pytest.mark.distributed(world_size=2, simulate=True)

        def test_of_us(monkeypatch):
            monkeypatch.delattr(torch._C, "_get_default_device")
            torch.ones(2) + 1

        def test_of_user():
            torch.nn.absent

        def test_without_flex_attention():
            torch.ones(2) + 1
        """
    )
    pytester.makeconftest(
        """
        from torch.nn.attention import flex_attention

        vars(flex_attention).pop("_validate_device", None)
        """
    )
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-p", "no:randomly")
    result.assert_outcomes(passed=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*UpstreamChangedError: torch * changed a private name of a class or module that a "
            "rank reads (module 'torch._C' has no attribute '_get_default_device'); pytest-fsdp-*",
            "E*AttributeError: module 'torch.nn' has no attribute 'absent'",
        ]
    )
