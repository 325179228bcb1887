"""Which interface others reach this machine through."""

import socket
import sys
from pathlib import Path

import pytest

from pytest_fsdp_comm.ranks.rank import process_group as network
from pytest_fsdp_comm.ranks.rank.process_group import (
    gloo_problem,
    interface_towards,
    no_network_problem,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def test_this_machine_is_reached_by_loopback():
    assert interface_towards("127.0.0.1", 1) == "lo"


def test_a_name_that_nobody_knows_has_no_interface():
    assert interface_towards("no-such-host.invalid", 1) is None


def test_another_machine_is_reached_by_the_default_route():
    # The kernel's own routing table: the default route's interface is in the first line with 0.
    routes = [line.split() for line in Path("/proc/net/route").read_text().splitlines()[1:]]
    default = [route[0] for route in routes if route[1] == "00000000"]
    if not default:
        pytest.skip("this machine has no route to others")
    assert interface_towards("192.0.2.1", 1) == default[0]


def test_addresses_of_both_kinds_lead_to_their_interface(monkeypatch, tmp_path):
    monkeypatch.setattr(network, "_IF_INET6", tmp_path / "if_inet6")
    packed = socket.inet_pton(socket.AF_INET6, "fd00::7").hex()
    (tmp_path / "if_inet6").write_text(f"{packed} 02 40 00 80 eth7\n")
    assert network._interface_with("fd00::7%eth7") == "eth7"
    assert network._interface_with("fd00::8") is None
    assert network._interface_with("::1") == "lo"
    assert network._interface_with("203.0.113.9") is None


@pytest.fixture
def interfaces(monkeypatch):
    """A machine whose interfaces are up or not."""

    def interfaces(**up):
        monkeypatch.setattr(network, "_names", lambda: list(up))
        monkeypatch.setattr(network, "_is_up", up.__getitem__)

    return interfaces


@pytest.mark.parametrize("name", ["lo", "eth0"])
def test_an_interface_that_is_up_is_no_problem(interfaces, name):
    interfaces(lo=True, eth0=True)
    assert gloo_problem({"GLOO_SOCKET_IFNAME": name}) == ""
    assert no_network_problem() == ""


def test_a_sandbox_that_tells_nothing_has_no_problem(interfaces):
    assert network._is_up("no-such-interface")
    interfaces()
    assert no_network_problem() == ""


def test_a_machine_without_network_is_told_to_bring_lo_up(interfaces):
    interfaces(lo=False, eth0=False)
    assert gloo_problem({"GLOO_SOCKET_IFNAME": "lo"}) == no_network_problem()
    assert no_network_problem().startswith(
        "no network interface of this machine is up, not even lo"
    )
    assert "`ip link set lo up`" in no_network_problem()


@pytest.mark.parametrize("name", ["ib0", "lo"], ids=["missing", "down"])
def test_interface_that_is_not_up_is_named(interfaces, name):
    interfaces(lo=False, eth0=True, eth1=True)
    assert gloo_problem({"GLOO_SOCKET_IFNAME": name}) == (
        f"GLOO_SOCKET_IFNAME={name} names no network interface that is up; set it to one that is "
        "(eth0, eth1)"
    )


def test_this_machine_has_an_interface_that_is_up():
    # What the kernel shows elsewhere.
    shown = [path.parent.name for path in Path("/sys/class/net").glob("*/flags")
             if int(path.read_text(), 16) & 1]  # fmt: skip
    assert [name for name in network._names() if network._is_up(name)] == sorted(
        shown, key=socket.if_nametoindex
    )
