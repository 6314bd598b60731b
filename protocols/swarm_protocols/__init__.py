"""The wire between swarm nodes: the group, its binary form, limits and reject reasons."""
