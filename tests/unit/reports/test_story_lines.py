"""Every step has words; those of whole stories are in the table of `tests/regressions`."""

import pytest

from pytest_fsdp_comm.comm.story import steps
from pytest_fsdp_comm.reports.story_lines import step_line

# What no story is made of itself.
BASES = {steps.Step, steps.GlobalStep, steps.Replaced, steps.Reduced}
KINDS = [
    kind
    for kind in vars(steps).values()
    if isinstance(kind, type) and issubclass(kind, steps.Step) and kind not in BASES
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_each_step_has_words_of_its_own(kind):
    assert step_line.dispatch(kind) is not step_line.dispatch(object)
    # A step that is the other way round does not borrow the words of the first.
    assert kind in step_line.registry


def test_a_step_without_words_is_an_error_that_says_where_they_are():
    with pytest.raises(TypeError, match="no words for Step: expected one of those in comm/story"):
        step_line(steps.Step())
