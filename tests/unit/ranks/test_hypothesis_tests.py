"""The private names of Hypothesis that equal examples on all ranks rely on."""

import inspect
import sys
import types

import hypothesis.core
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers

from pytest_fsdp_comm.errors import UpstreamChangedError
from pytest_fsdp_comm.ranks.rank.hypothesis_tests import align_examples


@pytest.mark.upstream
def test_hypothesis_has_the_private_names_that_are_used():
    getting = inspect.getsource(hypothesis.core.get_random_for_wrapped_test)
    assert "Random(global_force_seed)" in getting
    assert "_hypothesis_internal_use_settings" in getting
    assert callable(providers._get_local_constants)
    assert not len(type(providers._local_constants)())
    assert callable(providers.CONSTANTS_CACHE.cache.clear)
    assert st.DataObject.__name__ == "DataObject"
    assert callable(st.DataObject.draw)


def example(**options):
    @settings(**options)
    @given(st.integers())
    def test(number):
        raise ValueError(number)

    return types.SimpleNamespace(obj=test)


def test_settings_of_the_user_stay_but_for_what_goes_by_time_files_or_repetition(monkeypatch):
    monkeypatch.setattr(hypothesis.core, "global_force_seed", 7)
    monkeypatch.setattr(providers, "_get_local_constants", providers._get_local_constants)
    item = example(
        max_examples=9, derandomize=True, phases=[Phase.generate, Phase.target, Phase.shrink]
    )
    align_examples(item)
    found = item.obj._hypothesis_internal_use_settings
    assert found.max_examples == 9
    assert found.derandomize
    assert found.phases == (Phase.generate,)
    assert found.deadline is None
    assert found.database is None
    assert hypothesis.core.global_force_seed == 7
    with pytest.raises(ValueError, match=r"^\d+\n") as caught:
        item.obj()
    constants = providers._get_local_constants()
    assert not any(constants.set_for_type(kind) for kind in ("integer", "string"))
    assert "with N = 7" in "".join(caught.value.__notes__)


def test_other_tests_are_left_alone(monkeypatch):
    monkeypatch.setattr(hypothesis.core, "global_force_seed", None)
    for obj in (len, None):
        align_examples(types.SimpleNamespace(obj=obj))
    align_examples(types.SimpleNamespace())
    assert hypothesis.core.global_force_seed is None
    monkeypatch.delitem(sys.modules, "hypothesis.core")
    align_examples(example())


def test_a_name_that_moved_is_named(monkeypatch):
    monkeypatch.delattr(hypothesis.core, "global_force_seed")
    with pytest.raises(UpstreamChangedError, match=r"no longer has core\.global_force_seed"):
        align_examples(example())
