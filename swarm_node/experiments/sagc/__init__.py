"""`swarm-node reproduce sagc`: group-size controllers compared on a bandit, on drawn and recorded lengths, and in training."""
