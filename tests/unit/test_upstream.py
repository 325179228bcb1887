"""Errors about names that torch, pytest or syrupy moved."""

import re

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
