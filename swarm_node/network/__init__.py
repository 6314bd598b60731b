"""Groups to and from peers: gossip, a directory of addresses, identity and admission. Knows no model and no torch."""
