"""GPU and CPU kernels of the sparse rollout engine, each with a naive reference beside it."""
