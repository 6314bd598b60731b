"""hivemind's DHT without the rest of hivemind.

Importing any part of hivemind runs its packages' `__init__`, which import torch and a decentralised optimiser: 180 MB and over a second
for a process that only keeps addresses. Here the packages are entered without that. Where another version of hivemind is laid out
differently, it is imported as a whole instead.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

_PACKAGES = ("hivemind", "hivemind.dht", "hivemind.utils")
# What the DHT takes from `hivemind.utils` itself: name -> where it is defined.
_UTILS = {
    "MSGPackSerializer": "serializer",
    "SerializerBase": "serializer",
    "get_logger": "logging",
    "get_dht_time": "timed_storage",
    "DHTExpiration": "timed_storage",
    "TimedStorage": "timed_storage",
    "ValueWithExpiration": "timed_storage",
}


def prepare_hivemind() -> None:
    """Make `hivemind.dht.node`, `hivemind.dht.validation` and `hivemind.p2p` importable at little cost."""
    before = set(sys.modules)
    try:
        for name in _PACKAGES:
            _enter(name)
        utils = sys.modules["hivemind.utils"]
        for name, module in _UTILS.items():
            setattr(utils, name, getattr(importlib.import_module(f"hivemind.utils.{module}"), name))
        importlib.import_module("hivemind.dht.node")
    except (ImportError, AttributeError):
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "hivemind":
                del sys.modules[name]


def _enter(name: str) -> None:
    """Put a package into `sys.modules` without running its `__init__`. Raises ImportError when it is not installed."""
    parent, _, child = name.rpartition(".")
    spec = importlib.util.find_spec(name)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{name} is not a package")
    package = ModuleType(name)
    package.__path__ = list(spec.submodule_search_locations)
    package.__spec__ = spec
    sys.modules[name] = package
    if parent:
        setattr(sys.modules[parent], child, package)
