"""Errors about names that torch, pytest or syrupy moved."""

import importlib.util
import re
import sys

import pytest

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import UpstreamChangedError


def test_moved_name_error_lists_versions():
    error = upstream.moved_error("torch", "torch.nn.x", "the recorder relies on")
    assert isinstance(error, UpstreamChangedError)
    assert re.fullmatch(
        r"torch \S+ no longer has torch\.nn\.x, which the recorder relies on; pytest-fsdp-comm "
        r"was written for torch 2\.7 to 2\.15: use one of these versions, or upgrade "
        r"pytest-fsdp-comm",
        str(error),
    )


def test_moved_name_error_takes_a_remedy():
    error = upstream.moved_error("syrupy", "config._syrupy", "snapshots rely on", remedy="drop it")
    assert str(error).endswith("was written for syrupy 7.0: use that version, or drop it")


def test_misread_error_names_subject_and_problem():
    error = upstream.misread_error("torch", "FSDP2 that fsdp_tree reads", AttributeError("no _x"))
    assert re.match(
        r"torch \S+ changed a private name of FSDP2 that fsdp_tree reads \(no _x\); "
        r"pytest-fsdp-comm was written for torch",
        str(error),
    )


def test_missing_package_error_has_no_version(monkeypatch):
    monkeypatch.setitem(upstream.VERSIONS_READ, "absent-package", "1.0")
    error = upstream.moved_error("absent-package", "x", "y relies on")
    assert str(error).startswith("absent-package no longer has x, which y relies on; ")


@pytest.mark.parametrize("package", upstream.VERSIONS_READ)
def test_listed_packages_have_installed_names(package):
    pytest.importorskip(package.replace("-", "_"))
    assert re.match(rf"{package} \d", str(upstream.moved_error(package, "x", "y")))


def run(source, path=upstream.__file__, **names):
    """Run `source` in a block of `private_names`, as a part of the file at `path`."""
    with upstream.private_names("FSDP2 that fsdp_tree reads"):
        exec(compile(source, path, "exec"), names)  # noqa: S102  # source of these tests


class Absent:
    """Stands for a class of torch, and for a class of a user."""

    def __getattr__(self, name):
        raise AttributeError(f"no {name}", name=name, obj=self)


class OfTorch(Absent):
    __module__ = "torch.distributed.fsdp"


class OfUser(OfTorch):
    """A user's subclass of a class of torch."""


@pytest.mark.parametrize("value", [OfTorch(), OfUser(), OfTorch])
def test_name_that_torch_lacks_becomes_moved_error(value):
    with pytest.raises(UpstreamChangedError, match=r"FSDP2 that fsdp_tree reads .*_x"):
        run("value._x", value=value)


def test_import_that_torch_lacks_becomes_moved_error():
    torch = pytest.importorskip("torch")
    with pytest.raises(UpstreamChangedError, match="cannot import name '_x' from 'torch'"):
        run("from torch import _x")
    with pytest.raises(UpstreamChangedError, match=r"No module named .torch\._x."):
        run("import torch._x")
    with pytest.raises(UpstreamChangedError, match=r"module .torch\._C. has no attribute ._x."):
        run("torch._C._x", torch=torch)


@pytest.mark.parametrize("value", [Absent(), Absent, None, pytest])
def test_name_that_others_lack_stays_its_error(value):
    with pytest.raises(AttributeError, match="_x"):
        run("value._x", value=value)


@pytest.mark.parametrize("path", ["train.py", "/site-packages/torch/fsdp.py"])
def test_name_that_others_read_stays_their_error(path):
    with pytest.raises(AttributeError, match="_x"):
        run("value._x", path, value=OfTorch())
    with pytest.raises(ImportError):
        run("import torch._x", path)


def test_import_of_other_package_stays_its_error():
    with pytest.raises(ModuleNotFoundError):
        run("import absent_package")


@pytest.mark.parametrize("name", ["torch._x nn", "torch.nn _x", "torch.nn Module._x"])
def test_look_up_of_missing_name_is_moved_error(name):
    pytest.importorskip("torch")
    dotted = name.replace(" ", ".").replace(".", r"\.")
    with pytest.raises(UpstreamChangedError, match=f"no longer has {dotted}, which a test uses;"):
        upstream.look_up(*name.split(), "a test uses")


def test_torch_is_present_if_it_is_imported_or_can_be(monkeypatch):
    assert "torch" not in upstream.explain_missing_torch()
    # Its finder may be gone, as in a frozen program.
    monkeypatch.setitem(sys.modules, "torch", sys.modules.get("torch", re))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert upstream.explain_missing_torch() == ""
    monkeypatch.delitem(sys.modules, "torch")
    assert upstream.explain_missing_torch().startswith("torch is not installed for ")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert upstream.explain_missing_torch() == ""
