"""How much of what FSDP sends is padding, of recordings written by hand."""

from dataclasses import replace

import pytest
from report_values import KIB, record_step

from pytest_fsdp_comm.comm.padding import padding_nbytes


def changed(recording, kind, **changes):
    """A recording with another value in all collectives of a kind."""
    collectives = [
        replace(one, **changes) if one.kind == kind else one for one in recording.collectives
    ]
    return replace(recording, collectives=tuple(collectives))


STEP = record_step(2)
GATHERS = sum(one.kind == "all_gather" for one in STEP.collectives)


def test_a_step_that_divides_has_none():
    assert padding_nbytes(STEP) == 0
    assert padding_nbytes(replace(STEP, collectives=(), reshards=())) == 0


def test_what_is_sent_beyond_parameters_and_gradients_is_padding():
    padded = changed(STEP, "all_gather", nbytes_received=10 * KIB)
    # The root has 8 KiB, the layers 4, each gathered in forward and in backward.
    assert (
        padding_nbytes(changed(padded, "reduce_scatter", nbytes_received=10 * KIB))
        == (2 + (GATHERS - 1) * 6 + 2 * 6) * KIB
    )
    # Gradients are reduced in half as many bytes.
    halved = changed(padded, "reduce_scatter", nbytes_received=5 * KIB, dtype="bfloat16")
    assert padding_nbytes(halved) == (2 + (GATHERS - 1) * 6 + 2 * 3) * KIB


@pytest.mark.parametrize(
    "recording",
    [
        pytest.param(changed(STEP, "reduce_scatter", nbytes_received=2 * KIB), id="frozen"),
        pytest.param(changed(STEP, "all_gather", nbytes_received=2 * KIB), id="smaller type"),
        pytest.param(replace(STEP, reshards=()), id="gathered before"),
    ],
)
def test_padding_that_is_not_known_is_not_guessed(recording):
    assert padding_nbytes(recording) is None
