"""What is said when torch, pytest or syrupy moves a name: where, which versions, what to do."""

import re

import pytest

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import UpstreamChangedError


def test_a_name_that_moved_is_named_with_the_versions_that_were_read():
    error = upstream.moved("torch", "torch.nn.x", "the recorder relies on")
    assert isinstance(error, UpstreamChangedError)
    assert re.fullmatch(
        r"torch \S+ no longer has torch\.nn\.x, which the recorder relies on; pytest-fsdp-comm "
        r"was written for torch 2\.6 to 2\.15: use one of these, or upgrade pytest-fsdp-comm",
        str(error),
    )


def test_a_single_version_and_another_remedy_are_named():
    error = upstream.moved("syrupy", "config._syrupy", "snapshots rely on", remedy="drop it")
    assert str(error).endswith("was written for syrupy 7.0: use it, or drop it")


def test_a_misread_part_is_named_with_its_error():
    error = upstream.misread("torch", "FSDP2 that fsdp_tree reads", AttributeError("no _x"))
    assert re.match(
        r"torch \S+ moved a private name of FSDP2 that fsdp_tree reads: no _x; pytest-fsdp-comm "
        r"was written for torch",
        str(error),
    )


def test_a_package_that_is_not_installed_is_named_without_a_version(monkeypatch):
    monkeypatch.setitem(upstream.VERSIONS_READ, "absent-package", "1.0")
    error = upstream.moved("absent-package", "x", "y relies on")
    assert str(error).startswith("absent-package no longer has x, which y relies on; ")


@pytest.mark.parametrize("package", upstream.VERSIONS_READ)
def test_the_listed_packages_are_named_as_they_are_installed(package):
    pytest.importorskip(package.replace("-", "_"))
    assert re.match(rf"{package} \d", str(upstream.moved(package, "x", "y")))
