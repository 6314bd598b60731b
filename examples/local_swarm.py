"""A swarm on this machine: every node of a preset as a process of its own, connected over libp2p on loopback.

    python examples/local_swarm.py                      three tiny nodes, about seven minutes on two cores
    python examples/local_swarm.py --preset smollm2     two SmolLM2-135M nodes
    python examples/local_swarm.py --preset my.toml     a preset of your own (see examples/presets/tiny.toml)

Each node measures its accuracy on the held-out split before and after. The table, `summary.json`, a report with plots and every node's
home folder are kept under runs/, with runs/latest pointing at the newest. Ctrl-C stops all nodes, each with a checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w
from rich.console import Console
from rich.table import Table

from swarm_node.network.identity import load_or_create
from swarm_node.observe.metrics import Metrics, read_metrics
from swarm_node.observe.report import build_report
from swarm_node.observe.status_file import read_status
from swarm_node.observe.summary import NodeSummary, summarise

ROOT = Path(__file__).resolve().parent.parent
SWARM_NODE = (sys.executable, "-m", "swarm_node.cli.app")
PROGRESS_S = 15.0
STOP_S = 20.0

console = Console(width=None if sys.stdout.isatty() else 150)


@dataclass
class LocalNode:
    """A node's folder, process and what it has measured so far."""

    name: str
    model: str
    home: Path
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Run `swarm-node join` on the folder, in a session of its own; what it prints goes to node.log."""
        log = (self.home / "node.log").open("wb")
        # One thread a node: three nodes share the machine, and more threads than cores only wait for one another.
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        command = [*SWARM_NODE, "join", "--home", str(self.home)]
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True)

    def metrics(self) -> Metrics | None:
        """What it has measured; None before its first row."""
        path = self.home / "metrics.jsonl"
        return read_metrics(path) if path.exists() else None

    def progress(self) -> str:
        """One line: the last step, its G, the mean reward of the last ten steps, and the foreign groups used so far."""
        metrics, status = self.metrics(), read_status(self.home)
        if metrics is None or not metrics.steps:
            return f"{self.name} {status['state'] if status else 'starting'}"
        recent = [row.reward_mean for row in metrics.steps[-10:]]
        used = sum(row.foreign_groups_used for row in metrics.steps)
        last = metrics.steps[-1]
        return f"{self.name} step {last.step}, reward {sum(recent) / len(recent):.2f}, G {last.group_size}, {used} foreign groups used"

    def summary(self) -> NodeSummary:
        """Its row of the table; zeros where it never measured anything."""
        metrics = self.metrics() or Metrics((), (), (), 0)
        return dataclasses.replace(summarise(self.name, metrics), model=self.model)


def merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`over` on top of `base`, table by table."""
    merged = dict(base)
    for key, value in over.items():
        merged[key] = merge(base.get(key, {}), value) if isinstance(value, dict) else value
    return merged


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    for free in sockets:
        free.bind(("127.0.0.1", 0))
    ports = [free.getsockname()[1] for free in sockets]
    for free in sockets:
        free.close()
    return ports


def lay_out(preset: dict[str, Any], folder: Path) -> list[LocalNode]:
    """Make every node's home: an identity, and a configuration that names the first node as the one to dial.

    The first node is reached by its address; the last one knows only the first one's directory, so both ways of joining are used.
    """
    nodes: list[LocalNode] = []
    ports = free_ports(2 * len(preset["nodes"]))
    swarm = f"local-{folder.name}"
    for number, node in enumerate(preset["nodes"]):
        home = folder / node["name"]
        identity = load_or_create(home)
        gossip, directory = ports[2 * number : 2 * number + 2]
        network: dict[str, Any] = {
            "listen": [f"/ip4/127.0.0.1/tcp/{gossip}"],
            "directory_listen": f"/ip4/127.0.0.1/tcp/{directory}",
        }
        if number == 0:
            first_gossip = f"/ip4/127.0.0.1/tcp/{gossip}/p2p/{identity.peer_id}"
            first_directory = f"/ip4/127.0.0.1/tcp/{directory}/p2p/{identity.peer_id}"
        elif number == len(preset["nodes"]) - 1:
            network["directory_peers"] = [first_directory]
        else:
            network["peers"] = [first_gossip]
        config = merge(merge(preset.get("config", {}), node.get("config", {})), {"network": network, "swarm": swarm})
        (home / "config.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
        model = config["model"]
        nodes.append(LocalNode(node["name"], f"{model['name']} ({'LoRA' if model.get('lora') else 'full'})", home))
    return nodes


def watch(nodes: list[LocalNode], began: float) -> bool:
    """Show progress until every node has ended; returns whether all ended well."""
    shown = 0.0
    while any(node.process and node.process.poll() is None for node in nodes):
        time.sleep(0.5)
        if time.monotonic() - shown > PROGRESS_S:
            shown = time.monotonic()
            console.print(f"[dim]{shown - began:4.0f} s[/dim]  " + "  |  ".join(node.progress() for node in nodes), highlight=False)
        failed = [node for node in nodes if node.process and node.process.poll() not in (None, 0)]
        if failed:
            stop(nodes)
            for node in failed:
                assert node.process
                console.print(
                    f"[red]{node.name} ended with exit code {node.process.returncode}[/red]; the end of {node.home / 'node.log'}:"
                )
                console.print((node.home / "node.log").read_text(errors="replace")[-2000:], markup=False)
            return False
    return True


def stop(nodes: list[LocalNode]) -> None:
    """Ask every node to checkpoint and leave; kill what is still there after STOP_S seconds."""
    for node in nodes:
        if node.process and node.process.poll() is None:
            node.process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + STOP_S
    for node in nodes:
        if node.process:
            try:
                node.process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                node.process.kill()


def table(summaries: list[NodeSummary]) -> Table:
    """Per node: accuracy before and after on the held-out split, and what crossed the network."""
    shown = Table(title="accuracy on the held-out split, and groups exchanged")
    for column in ("node", "model", "steps", "accuracy", "sent", "received", "admitted", "foreign used", "rejected"):
        shown.add_column(column, justify="left" if column in ("node", "model") else "right")
    for row in summaries:
        accuracy = f"{row.accuracy_before:.3f} → {row.accuracy_after:.3f} ± {row.accuracy_standard_error:.3f}"
        counts = (row.groups_sent, row.groups_received, row.groups_admitted, row.foreign_groups_used, sum(row.rejections.values()))
        shown.add_row(row.name, row.model, str(row.steps), accuracy, *map(str, counts))
    return shown


def main() -> int:
    """The exit code: 0 when every node ended well, 1 when one failed, 2 when nothing was started, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="a name under examples/presets, or a TOML file")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs", help="folder that keeps the runs")
    arguments = parser.parse_args()
    path = Path(arguments.preset)
    if not path.suffix:
        path = ROOT / "examples" / "presets" / f"{arguments.preset}.toml"
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in (ROOT / "examples" / "presets").glob("*.toml")))
        console.print(f"no preset {arguments.preset!r}: choose {known}, or give a TOML file")
        return 2
    preset = tomllib.loads(path.read_text(encoding="utf-8"))
    if "pull" in preset and subprocess.run([*SWARM_NODE, "model", "pull", preset["pull"]], check=False).returncode:
        return 2

    folder = arguments.runs / time.strftime("%Y%m%d-%H%M%S")
    nodes = lay_out(preset, folder)
    latest = arguments.runs / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(folder.name)
    console.print(f"{len(nodes)} nodes: {', '.join(f'{node.name} {node.model}' for node in nodes)}; logs and checkpoints in {folder}")

    began = time.monotonic()
    stopped = False
    # The nodes are in sessions of their own: whatever ends this script must end them too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for node in nodes:
            node.start()
        well = watch(nodes, began)
    except KeyboardInterrupt:
        console.print("stopping: every node writes a checkpoint")
        well, stopped = True, True
    finally:
        stop(nodes)

    summaries = [node.summary() for node in nodes]
    seconds = round(time.monotonic() - began, 1)
    summary = {"seconds": seconds, "preset": path.stem, "nodes": [row.as_json() for row in summaries]}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    console.print(table(summaries))
    report = folder / "report.html"
    build_report([node.home for node in nodes], report)
    console.print(f"{seconds:.0f} s; summary: {folder / 'summary.json'}; report: {report}", soft_wrap=True)
    return 130 if stopped else 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
