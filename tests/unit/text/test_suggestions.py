"""Errors about names that do not exist list what there is; everything else is as in Python."""

import copy
import inspect
from dataclasses import dataclass
from unittest import mock

import pytest

from pytest_fsdp_comm.text.suggestions import NamedAttributes, closest, did_you_mean, shows_usage


@dataclass(frozen=True, slots=True)
class Point(NamedAttributes):
    _called = "point"

    width: int = 1

    @property
    def broken(self):
        return self.width.nothing


def test_an_unknown_attribute_lists_what_there_is():
    with pytest.raises(AttributeError) as caught:
        _ = Point().widht
    assert str(caught.value) == (
        "point has no attribute 'widht'; it has broken, width; did you mean 'width'?"
    )
    assert caught.value.name == "widht"
    with pytest.raises(AttributeError, match=r"^point has no attribute 'x'; it has broken, width$"):
        _ = Point().x


def test_what_asks_in_passing_is_answered_as_ever():
    point = Point()
    assert not hasattr(point, "height")
    assert getattr(point, "height", 3) == 3
    assert copy.copy(point) == copy.deepcopy(point) == point
    assert not hasattr(point, "__wrapped__")
    assert not hasattr(point, "__dict__")
    for name in ("__array__", "_pytestfixturefunction", "_called_once"):
        with pytest.raises(AttributeError, match=f"'Point' object has no attribute '{name}'"):
            getattr(point, name)
    double = mock.create_autospec(Point, instance=True)
    assert not hasattr(double, "widht")


def test_a_property_that_fails_says_why_itself():
    with pytest.raises(AttributeError, match="'int' object has no attribute 'nothing'"):
        _ = Point().broken


class Asked:
    @shows_usage("asked.count")
    def count(self, kind=None, *, phase=None):
        """Counts."""
        return len(kind) if kind else phase

    @shows_usage("mesh", usage="mesh(dp=2)")
    def mesh(self, **axes):
        return axes


def test_wrong_arguments_list_the_right_ones():
    with pytest.raises(TypeError) as caught:
        Asked().count(phse="forward")
    assert str(caught.value) == (
        "asked.count: got an unexpected keyword argument 'phse'; write "
        "asked.count(kind=None, *, phase=None); did you mean 'phase'?"
    )
    with pytest.raises(
        TypeError, match=r"^mesh: too many positional arguments; write mesh\(dp=2\)$"
    ):
        Asked().mesh((2,))


def test_right_arguments_and_their_errors_stay():
    assert Asked().count("abc") == 3
    assert Asked().mesh(dp=2) == {"dp": 2}
    with pytest.raises(TypeError, match="object of type 'int' has no len"):
        Asked().count(3)
    assert str(inspect.signature(Asked().count)) == "(kind=None, *, phase=None)"
    assert Asked.count.__doc__ == "Counts."


def test_nothing_is_meant_where_nothing_is_alike():
    assert closest("zzz", ["width"]) == ""
    assert did_you_mean("") == ""
