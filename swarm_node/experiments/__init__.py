"""Measurements that others can repeat: the benchmark, the group-size study and DistillSparse, each run from one command."""
