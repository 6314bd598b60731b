"""The sparse engine: a paged KV cache, continuous batching, and the policy's own modules walked over both."""
