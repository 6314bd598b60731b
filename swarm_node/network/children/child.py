"""The child's end of a supervised process: the descriptor from the command line, nothing on stdout, logs on stderr."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys

from swarm_node.logs import OURS, VARIABLE


def adopt_parent() -> socket.socket:
    """The socket to the parent. From here on only it speaks to the parent's reader; whatever prints, prints to stderr."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    OURS.setLevel(os.environ.get(VARIABLE, "warning").upper())
    return connection
