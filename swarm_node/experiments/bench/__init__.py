"""`swarm-node bench`: kernels and rollouts timed against transformers, vLLM and what the machine could do at best."""
