"""torchtitan's experts on simulated ranks send what they do on gloo ranks."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torchtitan.protocols.train_spec", reason="needs torchtitan 0.2 and triton")

RECORDED = """
    import json
    import pathlib

    import pytest
    from frameworks.test_torchtitan import _on_the_cpu, parallelized, train_step
    from oracle import lines
    from pytest_fsdp_comm.simulation.values import SimulationError
    from torchtitan.models import deepseek_v3


    def record(comm_mode, request, dist_info, *, is_forced=True):
        def configure(config):
            config.debug.moe_force_load_balance = is_forced

        world_size = dist_info.world_size
        degrees = {"ep": world_size, "world_size": world_size}
        model = parallelized(deepseek_v3, configure=configure, **degrees)
        with comm_mode(model):
            train_step(model, has_expert_groups=True)
        name = f"{request.node.originalname}-{dist_info.rank}.json"
        pathlib.Path(request.config.rootpath, name).write_text(json.dumps(lines(comm_mode)))


    @pytest.mark.distributed(SIZE, backend="gloo")
    def test_gloo(comm_mode, request, dist_info):
        record(comm_mode, request, dist_info)


    @pytest.mark.distributed(SIZE, simulate=True, ranks=range(SIZE))
    def test_forced(comm_mode, request, dist_info):
        record(comm_mode, request, dist_info)


    @pytest.mark.distributed(SIZE, simulate=True, ranks=range(SIZE), simulation_splits="even")
    def test_declared(comm_mode, request, dist_info):
        record(comm_mode, request, dist_info, is_forced=False)


    @pytest.mark.distributed(SIZE, simulate=True)
    def test_neither(comm_mode, request, dist_info):
        with pytest.raises(SimulationError, match=r"test_torchtitan\\.py:\\d+ reads values"):
            record(comm_mode, request, dist_info, is_forced=False)
"""


@pytest.mark.parametrize("world_size", [4, 8])
def test_experts_of_every_rank_send_what_they_do_on_gloo(pytester, world_size):
    pytester.makepyfile(test_it=RECORDED.replace("SIZE", str(world_size)))
    tests = Path(__file__).parents[1]
    result = pytester.runpytest_subprocess(
        *("-p", "no:cacheprovider", "-o", f"pythonpath={tests}"), timeout=300
    )
    result.assert_outcomes(passed=4)
    found = {path.name: json.loads(path.read_text()) for path in pytester.path.glob("*.json")}
    assert len(found) == 3 * world_size
    for rank in range(world_size):
        real = found[f"test_gloo-{rank}.json"]
        assert sum("all_to_all" in line for line in real) == 5
        assert found[f"test_forced-{rank}.json"] == real
        assert found[f"test_declared-{rank}.json"] == real
