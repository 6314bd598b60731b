"""Sampling with vLLM inside this process, its weights replaced by the policy's before every step that changed them."""
