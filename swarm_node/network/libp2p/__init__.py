"""The network process: GossipSub and pulls over libp2p, hardened against peers and confined to this process."""
