"""The measurement of a model's sparsity schedule, prompt by prompt, kept in a log and verified on held-out prompts."""
