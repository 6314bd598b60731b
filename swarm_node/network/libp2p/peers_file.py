"""The peers a node remembers from one run to the next."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from swarm_node.network.addresses import ADDRESSES_OF_ONE_PEER, Address, AddressError, parse_with_peer

PEERS_FILE = "peers.json"
MAX_PEERS = 256

log = logging.getLogger(__name__)


def read_peers(home: Path) -> list[Address]:
    """Addresses remembered in a home folder; an unreadable file is as good as none."""
    try:
        lists = json.loads((home / PEERS_FILE).read_text(encoding="utf-8"))
        texts = [text for addresses in lists.values() for text in addresses]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError, TypeError) as error:
        log.warning("%s is not used: %s", home / PEERS_FILE, error)
        return []
    found = []
    for text in texts:
        try:
            found.append(parse_with_peer(text))
        except (AddressError, AttributeError):
            log.warning("%s: %r is skipped", PEERS_FILE, text)
    return found


def write_peers(home: Path, peers: Mapping[str, Sequence[str]]) -> None:
    """Remember peers (peer id -> multiaddrs), the last ones of the mapping when there are too many; whole or not at all."""
    kept = dict(list(peers.items())[-MAX_PEERS:])
    content = json.dumps({peer: list(addresses)[:ADDRESSES_OF_ONE_PEER] for peer, addresses in kept.items()}, indent=1)
    temporary = home / f".{PEERS_FILE}.new"
    try:
        temporary.write_text(content + "\n", encoding="utf-8")
        os.replace(temporary, home / PEERS_FILE)
    except OSError as error:
        log.warning("%s cannot be written: %s", home / PEERS_FILE, error)
