"""Finds the network interface through which this machine is reached by others."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h
_IF_INET6 = Path("/proc/net/if_inet6")


def interface_towards(host: str, port: int) -> str | None:
    """The interface whose address a packet to a host carries as its sender's.

    Args:
        host: Name or address of a host that every other machine reaches, too.
        port: Any of its ports; nothing is sent.

    Returns:
        Its name, such as ``eth0``; None if it cannot be found.
    """
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.connect(address)
                return _interface_with(probe.getsockname()[0])
    return None


def _interface_with(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0])
    if wanted.is_loopback:
        return "lo"
    if wanted.version == 4:  # noqa: PLR2004  # IPv4
        return next((name for name in _names() if _ipv4_address(name) == wanted), None)
    lines = _IF_INET6.read_text().splitlines() if _IF_INET6.exists() else []
    owners = {line.split()[0]: line.split()[-1] for line in lines}
    return owners.get(wanted.packed.hex())


def _names() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _ipv4_address(name: str) -> ipaddress.IPv4Address | None:
    import fcntl  # noqa: PLC0415  # not on every system

    request = struct.pack("256s", name.encode()[:15])
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
        return ipaddress.IPv4Address(answer[20:24])
    return None
