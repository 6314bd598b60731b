"""The commands of `swarm-node`, one a file; what they do lives in the rooms below."""
