"""What is said when torch, pytest or syrupy moves a name: where, which versions, what to do."""

import re
import sys
import tomllib
from pathlib import Path

import pytest

from pytest_fsdp_comm import upstream
from pytest_fsdp_comm.errors import UpstreamChangedError


def test_a_moved_private_name_is_reported_with_the_versions_known_to_have_it():
    error = upstream.moved_error("torch", "torch.nn.x", "the recorder relies on")
    assert isinstance(error, UpstreamChangedError)
    assert re.fullmatch(
        r"torch \S+ no longer has torch\.nn\.x, which the recorder relies on; pytest-fsdp-comm "
        r"was written for torch 2\.7 to 2\.15: use one of these, or upgrade pytest-fsdp-comm",
        str(error),
    )


def test_a_single_version_and_another_remedy_are_named():
    error = upstream.moved_error("syrupy", "config._syrupy", "snapshots rely on", remedy="drop it")
    assert str(error).endswith("was written for syrupy 7.0: use it, or drop it")


def test_a_part_that_could_not_be_read_is_named_with_its_error():
    error = upstream.misread_error("torch", "FSDP2 that fsdp_tree reads", AttributeError("no _x"))
    assert re.match(
        r"torch \S+ moved a private name of FSDP2 that fsdp_tree reads: no _x; pytest-fsdp-comm "
        r"was written for torch",
        str(error),
    )


def test_a_missing_package_is_named_without_a_version(monkeypatch):
    monkeypatch.setitem(upstream.VERSIONS_READ, "absent-package", "1.0")
    error = upstream.moved_error("absent-package", "x", "y relies on")
    assert str(error).startswith("absent-package no longer has x, which y relies on; ")


@pytest.mark.parametrize("package", upstream.VERSIONS_READ)
def test_the_listed_packages_are_named_as_they_are_installed(package):
    pytest.importorskip(package.replace("-", "_"))
    assert re.match(rf"{package} \d", str(upstream.moved_error(package, "x", "y")))


@pytest.mark.parametrize(
    ("name", "version", "needs"),
    [
        ("syrupy", "5.1.0", "syrupy>=7,<8"),
        ("syrupy", "8.0.0a1", "syrupy>=7,<8"),
        ("syrupy", "6.9", "syrupy>=7,<8"),
        ("pytest", "8.3.5", "pytest>=8.4"),
        ("pytest", "7", "pytest>=8.4"),
    ],
)
def test_another_version_is_refused_with_the_command_that_installs_one(name, version, needs):
    with pytest.raises(UpstreamChangedError) as caught:
        upstream.check_versions({name: version})
    assert str(caught.value) == (
        f"{name} {version} is installed, but pytest-fsdp-comm needs {needs}: {sys.executable} -m "
        f'pip install "{needs}"'
    )


def test_supported_versions_pass():
    for pytest_version in ("8.4", "8.4.2", "9.0.0rc1", "10.1.dev3+g12"):
        upstream.check_versions({"pytest": pytest_version, "syrupy": "7.0.2"})


def test_the_required_versions_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    dependencies = project["project"]["dependencies"]
    assert {name + required for name, required in upstream.REQUIRED.items()} < {*dependencies}
