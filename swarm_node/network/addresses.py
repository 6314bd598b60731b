"""Multiaddrs as users write them: checked without libp2p, with errors that show what a good one looks like."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import psutil

from swarm_node.network.identity import decode_peer_id

PATIENCE_S = 3.0
"""How long a port that was asked for may be taken before that is an error."""
EXAMPLE = "/ip4/192.0.2.7/tcp/31310/p2p/12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"
ADDRESSES_OF_ONE_PEER = 4
"""So many are told and remembered."""
_HOST_NAME = re.compile(
    r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?)*\.?"
)


class AddressError(ValueError):
    """A multiaddr that this node cannot use; the message names it and shows a good one."""


class ListenError(AddressError):
    """An address that was asked for cannot be listened on."""


@dataclass(frozen=True)
class Address:
    """`/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/p2p/PEER]`."""

    kind: str
    host: str
    port: int
    peer: str = ""
    """The peer id, or empty: then it is learned from whoever answers at the address."""

    def __str__(self) -> str:
        return self.transport + (f"/p2p/{self.peer}" if self.peer else "")

    @property
    def transport(self) -> str:
        """The address without the peer id."""
        return f"/{self.kind}/{self.host}/tcp/{self.port}"

    @property
    def is_name(self) -> bool:
        """Whether the host is a name that has to be resolved."""
        return self.kind.startswith("dns")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" if self.is_name else ipaddress.ip_address(self.host).is_loopback

    @property
    def is_any(self) -> bool:
        """Whether it means every interface: fine to listen on, useless to dial."""
        return not self.is_name and ipaddress.ip_address(self.host).is_unspecified

    def with_peer(self, peer: str) -> Address:
        """The same address of a certain peer."""
        return Address(self.kind, self.host, self.port, peer)


def parse_address(text: str) -> Address:
    """Read a multiaddr. Raises AddressError."""

    def refuse(why: str) -> AddressError:
        return AddressError(f"{text!r} is not an address that can be used: {why}. A good one looks like {EXAMPLE}")

    parts = text.strip().split("/")
    if parts[0] != "" or len(parts) < 2 or not parts[1]:
        raise refuse("a multiaddr starts with /ip4/, /ip6/ or /dns4/")
    kind = parts[1]
    if kind not in ("ip4", "ip6", "dns", "dns4", "dns6"):
        raise refuse(f"/{kind}/ is not one of /ip4/, /ip6/, /dns/, /dns4/, /dns6/")
    if len(parts) < 3 or not parts[2]:
        raise refuse(f"the host after /{kind}/ is missing")
    host = parts[2]
    if kind == "ip4" and not _is_ip(host, 4):
        raise refuse(f"{host!r} is not an IPv4 address" + (" (a name goes after /dns4/)" if _HOST_NAME.fullmatch(host) else ""))
    if kind == "ip6" and not _is_ip(host, 6):
        raise refuse(f"{host!r} is not an IPv6 address")
    if kind.startswith("dns") and not _HOST_NAME.fullmatch(host):
        raise refuse(f"{host!r} is not a host name")
    if len(parts) < 4 or parts[3] != "tcp":
        raise refuse(f"only TCP is spoken, so /tcp/PORT must follow {host}")
    if len(parts) < 5 or not re.fullmatch(r"[0-9]{1,5}", parts[4]) or int(parts[4]) > 65535:
        raise refuse("the port after /tcp/ must be a number from 0 to 65535")
    peer = ""
    if len(parts) > 5:
        if parts[5] not in ("p2p", "ipfs") or len(parts) != 7 or not parts[6]:
            raise refuse("nothing but /p2p/PEER-ID may follow the port")
        peer = parts[6]
        if not _is_peer_id(peer):
            raise refuse(f"{peer!r} is not a peer id (12D3KooW...)")
    return Address(kind, host, int(parts[4]), peer)


def parse_listening(text: str) -> Address:
    """Read a multiaddr to listen on; a name is refused: libp2p would listen on every interface instead. Raises AddressError."""
    address = parse_address(text)
    if address.is_name:
        raise AddressError(
            f"{text!r} is a name: give the address of this machine to listen on, for example /ip4/0.0.0.0/tcp/{address.port}"
        )
    return address


def parse_dialable(text: str) -> Address:
    """Read a multiaddr of a peer to dial; a port of 0 or an address that means every interface is refused. Raises AddressError."""
    address = parse_address(text)
    if address.is_any or address.port == 0:
        what = "means every interface of a machine" if address.is_any else "has port 0, which means any"
        raise AddressError(f"{text!r} {what} and cannot be dialled. A good one looks like {EXAMPLE}")
    return address


def parse_peer(text: str) -> Address:
    """Read a multiaddr that names its peer, or a host whose peer id is to be learned. Raises AddressError."""
    address = parse_dialable(text)
    return address if address.is_name else parse_with_peer(text)


def parse_with_peer(text: str) -> Address:
    """Read a multiaddr that must name its peer. Raises AddressError."""
    address = parse_dialable(text)
    if not address.peer:
        raise AddressError(
            f"{text!r} does not end in /p2p/PEER-ID, so nobody can tell whether the right node answers. "
            f"The node at that address prints it in full when it starts; a good one looks like {EXAMPLE}"
        )
    return address


def local_addresses() -> list[str]:
    """IPv4 addresses under which other machines may reach this one, the default route's first; without loopback."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: only asks which interface would be used
            found.append(probe.getsockname()[0])
        except OSError:
            pass
    try:
        names = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        names = []
    found += [str(entry[4][0]) for entry in names]
    usable = [host for host in found if not (ipaddress.ip_address(host).is_loopback or ipaddress.ip_address(host).is_unspecified)]
    return list(dict.fromkeys(usable))


def dialable(bound: Address) -> list[Address]:
    """What others dial to reach a bound socket: never 0.0.0.0, and loopback only when there is nothing else."""
    if not bound.is_any:
        return [bound]
    kind = "ip4"
    hosts = local_addresses() or ["127.0.0.1"]
    return [Address(kind, host, bound.port, bound.peer) for host in hosts]


def free_addresses(wanted: Sequence[Address]) -> tuple[list[Address], tuple[str, ...]]:
    """What can be listened on: a port that another process holds becomes port 0, an address that this machine has not is left out.

    Returns the addresses, and a sentence for each that is not as wanted.
    """
    free, notices = [], []
    for address in wanted:
        problem = _why_not(address) if address.port else None
        if problem is None:
            free.append(address)
        elif problem.errno == errno.EADDRINUSE:
            free.append(Address(address.kind, address.host, 0))
            notices.append(f"port {address.port} is taken on this machine, so another one is used")
        else:
            notices.append(f"cannot listen on {address.transport} ({problem.strerror}): others cannot dial this node there")
    return free, tuple(notices)


def check_free(addresses: Sequence[Address]) -> None:
    """Whether all of `addresses` can be listened on, together.

    Raises:
        ListenError: one cannot; the message says who holds the port, and what to do.
    """
    with ExitStack() as held:
        for address in addresses:
            try:
                held.enter_context(_bind_patiently(address))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    why = f"{_holder_of(address.port)} holds port {address.port}. Stop it, give another port, or 0 for any"
                elif error.errno == errno.EACCES:
                    why = f"{error.strerror}. Give a port above 1023"
                else:
                    why = f"{error.strerror}. Give an address of this machine, or 0.0.0.0 for all that it has"
                raise ListenError(f"cannot listen on {address.transport}: {why}") from None


def _bind_patiently(address: Address) -> socket.socket:
    """As `_bind`; a port that is taken is waited for: the children of a node that was killed just now end a moment after it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return _bind(address)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


def _holder_of(port: int) -> str:
    """Who listens on a port, as far as this process may know."""
    try:
        pids = {link.pid for link in psutil.net_connections("tcp") if link.status == psutil.CONN_LISTEN and link.laddr[1] == port}
        names = [f"process {pid} ({psutil.Process(pid).name()})" for pid in pids if pid is not None]
    except psutil.Error:
        names = []
    return names[0] if names else "another process"


def _why_not(address: Address) -> OSError | None:
    try:
        _bind(address).close()
    except OSError as error:
        return error
    return None


def _bind(address: Address) -> socket.socket:
    """A socket that listens there. Raises OSError."""
    probe = socket.socket(socket.AF_INET6 if address.kind == "ip6" else socket.AF_INET, socket.SOCK_STREAM)
    try:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if address.kind == "ip6":
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind((address.host, address.port))
        probe.listen(1)
    except OSError:
        probe.close()
        raise
    return probe


def _is_ip(host: str, version: int) -> bool:
    try:
        return ipaddress.ip_address(host).version == version
    except ValueError:
        return False


def _is_peer_id(text: str) -> bool:
    try:
        raw = decode_peer_id(text)
    except ValueError:
        return False
    # The identity multihash of an Ed25519 key, or the SHA-256 multihash of an RSA key.
    return (raw[:2] == b"\x00\x24" and len(raw) == 38) or (raw[:2] == b"\x12\x20" and len(raw) == 34)
