"""Finds the network interface through which others reach this machine, and why none can."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"

_SIOCGIFFLAGS = 0x8913  # linux/sockios.h
_SIOCGIFADDR = 0x8915
_IFF_UP = 0x1  # linux/if.h
_IF_INET6 = Path("/proc/net/if_inet6")


def interface_towards(host: str, port: int) -> str | None:
    """The interface, such as ``eth0``, through which packets to a host leave; None if unknown."""
    # Connecting a UDP socket chooses its address, and sends nothing.
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return _interface_with(probe.getsockname()[0])
    return None


def gloo_problem(environment: Mapping[str, str]) -> str:
    """What keeps gloo from connecting on this machine, and the remedy; empty if nothing known."""
    name = environment.get(INTERFACE_VARIABLE)
    up = [one for one in _names() if _is_up(one)]
    if not up or not name or name in up:
        return no_network_problem()
    return (
        f"{INTERFACE_VARIABLE}={name} names no network interface that is up; set it to one that is "
        f"({', '.join(up)})"
    )


def no_network_problem() -> str:
    """What is wrong where no network interface is up, and the remedy; empty if one is."""
    names = _names() if sys.platform == "linux" else []
    if not names or any(_is_up(name) for name in names):
        return ""
    return (
        "no network interface of this machine is up, not even lo, and ranks connect over TCP: "
        "bring lo up (`ip link set lo up`), as `docker run --network none` does too"
    )


def _interface_with(name: str) -> str | None:
    wanted = ipaddress.ip_address(name.partition("%")[0])
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 4:  # noqa: PLR2004  # IPv4
        # These bytes of the answer are the address.
        answers = ((name, _ask(name, _SIOCGIFADDR)[20:24]) for name in _names())
        return next((name for name, address in answers if address == wanted.packed), None)
    lines = _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else []
    owners = {line.split()[0]: line.split()[-1] for line in lines}
    return owners.get(wanted.packed.hex())


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _is_up(name: str) -> bool:
    answer = _ask(name, _SIOCGIFFLAGS)
    # A sandbox may not tell; then nothing is known to be wrong.
    return not answer or bool(struct.unpack_from("h", answer, 16)[0] & _IFF_UP)


def _ask(name: str, request: int) -> bytes:
    """The kernel's answer about an interface (`struct ifreq`); empty if it gives none."""
    import fcntl  # noqa: PLC0415  # not on every system

    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        return fcntl.ioctl(probe.fileno(), request, struct.pack("256s", name.encode()[:15]))
    return b""
