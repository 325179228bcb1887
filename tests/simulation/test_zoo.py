"""One step of each published model of the zoo, against sums over the shapes of its parameters."""

import pytest
import zoo

QUICK = {"Llama 3.2 1B"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.large) for name in zoo.ZOO],
)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # of torch, about heads' views
@pytest.mark.distributed(
    world_size=zoo.RANKS, simulate=True, simulation_splits="even", timeout_s=600
)
def test_step_sends_the_derived_bytes(name, device_mesh, comm_mode):
    pytest.importorskip("transformers", minversion="5.23")  # older ones checkpoint otherwise
    num_parameters, derived, row = zoo.step(name, device_mesh(), comm_mode)
    assert num_parameters == pytest.approx(zoo.ZOO[name]["billions"] * 1e9, rel=0.01)
    recorded = {way: comm_mode.nbytes(way[0], phase=way[1]) for way in derived}
    assert recorded == derived
    assert comm_mode.nbytes() == sum(derived.values()) - derived[zoo.FORWARD]  # and nothing else
    assert row == zoo.rows()[name], f"run: python tests/zoo.py '{name}'"


def test_table_has_a_row_for_each_model_of_the_zoo():
    assert [*zoo.rows()] == [*zoo.ZOO], "run: python tests/zoo.py"
