"""What can go wrong with a model that a user named."""

from __future__ import annotations


class ModelError(ValueError):
    """The model cannot be had or held as asked: unknown, not pulled, damaged, too large. The message says what to do."""
