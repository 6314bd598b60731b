"""GossipSub with the settings and the restraint that a swarm of groups needs (py-libp2p's defaults do not suit it)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.mcache import MessageCache

from swarm_node.network.libp2p.guard import PeerGuard
from swarm_node.network.options import NetworkOptions

# v1.1 only: v1.2's IDONTWANT doubles the CPU time, and later versions add nothing that a swarm uses.
GOSSIP_PROTOCOLS: Sequence[TProtocol] = (PROTOCOL_ID_V11,)
MAX_BACK_OFF_S = 600
"""Longest time for which a peer can keep itself out of this node's mesh."""
MESSAGE_CACHE_BYTES = 32 * 1024 * 1024
"""Bodies kept to answer neighbours that missed one."""


class Router(GossipSub):
    """GossipSub v1.1 that confines errors and keeps no bodies beyond a bound."""

    def __init__(self, options: NetworkOptions, guard: PeerGuard) -> None:
        super().__init__(
            protocols=list(GOSSIP_PROTOCOLS),
            degree=options.degree,
            degree_low=max(1, options.degree - 1),
            degree_high=options.degree * 2,
            heartbeat_interval=1,
            heartbeat_initial_delay=0.1,
            gossip_window=3,
            gossip_history=5,
            prune_back_off=10,
            unsubscribe_back_off=5,
            adaptive_gossip_enabled=False,  # it would reset the heartbeat to 30 s
            spam_protection_enabled=False,  # 10 messages a second per forwarder, the rest not forwarded: quotas are ours, per signer
            eclipse_protection_enabled=False,  # its grafting fights the pruning
            max_pending_messages_per_peer=4,  # whole bodies, kept for peers that may never subscribe
        )
        self.heartbeat_interval = options.heartbeat_s  # type: ignore[assignment]  # trio sleeps fractions as well
        self.mcache = BoundedMessageCache(self.mcache.window_size, self.mcache.history_size, MESSAGE_CACHE_BYTES)
        self._guard = guard

    async def heartbeat(self) -> None:
        """As GossipSub's; an error in one beat does not end the beating."""
        while True:
            with self._guard.watch("heartbeat"):
                await super().heartbeat()
            await trio.sleep(self.heartbeat_interval)

    async def publish(self, msg_forwarder: ID, pubsub_msg: Any) -> None:
        """As stock, without a record of deliveries that would grow for ever."""
        await super().publish(msg_forwarder, pubsub_msg)
        self.recent_message_deliveries.clear()  # only adaptive gossip reads it, and only that empties it

    async def handle_graft(self, graft_msg: Any, sender_peer_id: ID) -> None:
        """As stock for topics of the mesh; others are ignored."""
        if graft_msg.topicID in self.mesh:
            await super().handle_graft(graft_msg, sender_peer_id)

    async def handle_prune(self, prune_msg: Any, sender_peer_id: ID) -> None:
        """As stock for topics of the mesh; a back-off lasts MAX_BACK_OFF_S at most."""
        # Stock notes a back-off for every topic that anybody makes up, and for as long as they say.
        if prune_msg.topicID in self.mesh:
            prune_msg.backoff = min(prune_msg.backoff, MAX_BACK_OFF_S)
            await super().handle_prune(prune_msg, sender_peer_id)

    async def handle_ihave(self, ihave_msg: Any, sender_peer_id: ID) -> None:
        """As stock for topics of the mesh; others are ignored."""
        if ihave_msg.topicID in self.mesh:
            await super().handle_ihave(ihave_msg, sender_peer_id)

    async def _do_px(self, px_peers: Any) -> None:
        # A pruning peer could make this node dial whomever it names; peers are exchanged by a protocol of our own.
        return

    def mesh_heartbeat(self) -> Any:
        """As stock, after forgetting the back-offs that are over."""
        now = time.time()
        for topic, until in self.back_off.items():
            self.back_off[topic] = {peer: end for peer, end in until.items() if end > now}
        return super().mesh_heartbeat()

    def _check_equivocation(self, msg: Any) -> bool:
        # Stock keeps up to 1,000 whole bodies to compare. A second message of the same number is dropped as seen before it gets here.
        return True

    def _perform_opportunistic_grafting(self, topic: str, peers_to_graft: Any) -> int:
        # Fights the pruning and empties meshes: 8 nodes delivered 51-64 % with it, 100 % without.
        return 0

    async def _consider_peer_replacement(self, topic: str) -> None:
        # The same fight; all scores are equal here, reputation is ours.
        return


class BoundedMessageCache(MessageCache):
    """A message cache that holds at most so many bytes; the oldest bodies go first."""

    def __init__(self, window_size: int, history_size: int, max_bytes: int) -> None:
        super().__init__(window_size, history_size)
        self.max_bytes = max_bytes
        self.bytes = 0

    def put(self, msg: Any) -> None:
        """Keep a message, and drop the oldest while there are more bytes than `max_bytes`. The newest always stays."""
        before = len(self.msgs)
        super().put(msg)
        if len(self.msgs) == before:
            return
        self.bytes += len(msg.data)
        while self.bytes > self.max_bytes and len(self.msgs) > 1:
            self._forget(next(iter(self.msgs)))

    def shift(self) -> None:
        """Begin the next window; bytes of messages that fell out of the last one are free."""
        super().shift()
        self.bytes = sum(len(msg.data) for msg in self.msgs.values())

    def _forget(self, mid: bytes) -> None:
        self.bytes -= len(self.msgs.pop(mid).data)
        for entries in self.history:
            entries[:] = [entry for entry in entries if entry.mid != mid]
