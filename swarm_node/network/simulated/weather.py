"""What a simulated network does to messages: latency, loss, duplication, bandwidth, and nodes that come and go."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Link:
    """One direction between two peers. Latency is drawn for each message, so messages overtake each other where `jitter` > 0."""

    latency_s: float = 0.05
    """Median of the log-normal latency, seconds."""
    jitter: float = 0.3
    """Standard deviation of the latency's logarithm: at 0.3 one message in 20 takes 1.6 times the median or longer."""
    loss: float = 0.0
    """Probability that a gossip message is lost. Pulls are streams: they fail only with the connection."""
    duplication: float = 0.0
    """Probability that a gossip message arrives twice."""
    bytes_per_s: float = 1.25e6
    """Transfer speed; 1.25e6 is 10 Mbit/s."""

    def delay(self, size: int, draws: random.Random) -> float:
        """Seconds until a message of `size` bytes has arrived."""
        return self.latency_s * math.exp(self.jitter * draws.gauss(0, 1)) + size / self.bytes_per_s


@dataclass(frozen=True)
class Churn:
    """Peers that leave and rejoin, with exponential times."""

    mean_up_s: float
    mean_down_s: float
