"""Which interface others reach this machine through."""

import socket
import sys
from pathlib import Path

import pytest

from pytest_fsdp_comm.ranks.rank import process_group as network
from pytest_fsdp_comm.ranks.rank.process_group import interface_towards

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
