"""`swarm-node simulate`: a swarm in this process, in virtual time."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarm_node.cli.output import number, print_json, print_table
from swarm_node.cli.places import JsonOption

if TYPE_CHECKING:
    from swarm_node.simulation import SimulatedNode

EXAMPLE = "Example: swarm-node simulate --node tiny-s --node tiny-m-words:lora --steps 20 --loss 0.1"


class SimulateError(ValueError):
    """The simulated swarm cannot be made as asked."""


def simulate(
    node: Annotated[list[str] | None, typer.Option(help="A node's model; `:lora` trains an adapter. Repeatable; default: three.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps that every node takes; default 10 without --seconds.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.0, help="Virtual seconds instead of steps.")] = None,
    latency: Annotated[float, typer.Option(min=0.0, help="Median latency between two nodes, seconds.")] = 0.05,
    loss: Annotated[float, typer.Option(min=0.0, max=1.0, help="Share of messages that are lost.")] = 0.0,
    speed: Annotated[
        float, typer.Option(min=1.0, help="Tokens a virtual second of the first node; each further one needs 1.5 times as long.")
    ] = 1000.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of everything.")] = 0,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="An option of every node. Repeatable.")] = None,
    json: JsonOption = False,
) -> None:
    """Run a swarm of real nodes on a simulated network, without a socket.

    Nodes train for real; only the network and the clock are simulated, so the same seed gives the same swarm.
    """
    if steps is not None and seconds is not None:
        raise SimulateError(f"--steps {steps} and --seconds {seconds:g} exclude each other: give one of them")
    from swarm_node.config import parse_setting

    tables: dict[str, Any] = {}
    for setting in map(parse_setting, set_ or ()):
        table, dot, name = setting.key.partition(".")
        if not dot:
            raise SimulateError(f"--set {setting.key}: write section.key=value, for example --set rollout.max_new_tokens=96")
        tables.setdefault(table, {})[name] = setting.value

    from swarm_node.network.simulated.weather import Link
    from swarm_node.simulation import NodeSpec, Swarm

    specs = []
    for number_, text in enumerate(node or ("tiny-s", "tiny-m", "tiny-m-words:lora")):
        model, colon, mode = text.partition(":")
        if colon and mode != "lora":
            raise SimulateError(f"--node {text}: only `:lora` may follow the model's name")
        specs.append(NodeSpec(f"node-{number_ + 1}", model, mode == "lora", speed / 1.5**number_, tables))
    swarm = Swarm(specs, seed=seed, link=Link(latency_s=latency, loss=loss))

    def show(member: SimulatedNode) -> None:
        row = member.rows[-1]
        print(
            f"{swarm.network.now:7.1f} s  {member.spec.name} step {row.step}, reward {row.reward_mean:.2f}, "
            f"{row.foreign_groups_used} foreign groups used",
            file=sys.stderr,
        )

    swarm.run(steps=None if seconds is not None else steps or 10, seconds=seconds, on_step=show)
    rows = [_sum_up(member) for member in swarm]
    if json:
        print_json({"seconds": swarm.network.now, "nodes": rows})
        return
    heads = ["node", "model", "steps", "first reward", "last reward", "sent", "received", "admitted", "foreign used", "rejected"]
    keys = ("steps", "groups_sent", "groups_received", "groups_admitted", "foreign_groups_used")
    print_table(
        heads,
        [
            [
                row["name"],
                row["model"],
                str(row["steps"]),
                number(row["reward_first"]),
                number(row["reward_last"]),
                *(str(row[key]) for key in keys[1:]),
                str(sum(row["rejections"].values())),
            ]
            for row in rows
        ],
        title=f"{swarm.network.now:.1f} virtual seconds",
    )


def _sum_up(member: SimulatedNode) -> dict[str, Any]:
    """A node's run in numbers; rewards are means over the first and the last quarter of its steps."""
    rows = member.rows
    quarter = max(1, len(rows) // 4)

    def mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else float("nan")

    return {
        "name": member.spec.name,
        "model": member.spec.model + (" (LoRA)" if member.spec.lora else " (full)"),
        "steps": len(rows),
        "reward_first": mean([row.reward_mean for row in rows[:quarter]]),
        "reward_last": mean([row.reward_mean for row in rows[-quarter:]]),
        "groups_sent": sum(row.groups_sent for row in rows),
        "groups_received": sum(row.groups_received for row in rows),
        "groups_admitted": sum(row.groups_admitted for row in rows),
        "foreign_groups_used": sum(row.foreign_groups_used for row in rows),
        "rejections": member.node.rejections(),
    }
