"""What a node accepts from the wire. Every bound is checked before anything of the declared size is allocated."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """Upper bounds unless the name says otherwise. Sizes are in bytes, counts in items."""

    inline_bytes: int = 200_000
    """Largest body that travels inside a gossip message; GossipSub carries larger ones badly (1 MiB is lost silently), so they are
    announced and pulled."""
    body_bytes: int = 4 * 1024 * 1024
    """An encoded group, inline or pulled."""
    header_bytes: int = 1024
    """The msgpack header of a group body."""
    completions_min: int = 2
    """A group of one has no ranking to learn from."""
    completions: int = 64
    tokens_per_completion: int = 32_768
    """At most 65,535: a length travels as 16 bits."""
    tokens: int = 524_288
    """Completion tokens of one group."""
    text_bytes: int = 128
    """UTF-8 bytes of one string: task, model, engine, dtype."""
    summary_bytes: int = 256
    """UTF-8 bytes of a policy summary in announcements and greetings."""
    wants: int = 16
    """Entries of a greeting's list of wants."""
    temperature: float = 16.0
    temperature_min: float = 0.05
    """Logits are divided by the temperature: near 0 the gradient of a receiver's log-probs overflows."""

    @property
    def message_bytes(self) -> int:
        """A whole gossip message: an inline body or any other kind, with the array around it."""
        return self.inline_bytes + 64


DEFAULT_LIMITS = Limits()
