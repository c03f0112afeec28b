"""The command that lists the nodes."""

from __future__ import annotations

from rich.text import Text

from coordinator.client import call
from coordinator.commands.common import ADDRESS, Address, AsJson, console, print_json, say, table
from coordinator.live import duration, plain, speed
from coordinator.status import NodeState

#: What an active node is called on which something does not work as it should.
DEGRADED = "DEGRADED"


def nodes(as_json: AsJson = False, address: Address = ADDRESS) -> None:
    """List the nodes and what each does."""
    listed = call(address, lambda client: client.nodes())
    if as_json:
        print_json([node.to_json() for node in listed])
        return
    if not listed:
        say(f"no nodes; start one with: eval-agent run --coordinator {address}")
        return
    rows = table(
        "node", "site", "state", "doing", "held", "done", "tokens/s", "last heard", right=("held", "done", "tokens/s")
    )
    for node in listed:
        rows.add_row(
            Text(plain(node.node)),
            Text(plain(node.site)),
            DEGRADED if node.degraded and node.state is NodeState.ACTIVE else node.state.value,
            Text(plain(node.activity) or "-"),
            str(len(node.held)),
            str(node.shards_done),
            speed(node.tokens_per_second),
            f"{duration(node.silence_seconds)} ago",
        )
    console().print(rows)
    for node in listed:
        for line in node.degraded:
            say(f"{plain(node.node)} is degraded: {plain(line)}")
