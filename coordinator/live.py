"""A job's progress as people see it: a live table on a terminal, plain lines elsewhere. Computes no status."""

from __future__ import annotations

from collections.abc import AsyncIterable
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.status import JobState, JobStatus, NodeState

_JOB_STYLE = {
    JobState.PLANNING: "yellow",
    JobState.RUNNING: "cyan",
    JobState.SUCCEEDED: "bold green",
    JobState.FAILED: "bold red",
    JobState.CANCELLED: "bold yellow",
}
_NODE_STYLE = {
    NodeState.ACTIVE: "green",
    NodeState.SUSPECT: "yellow",
    NodeState.LOST: "bold red",
    NodeState.DRAINING: "yellow",
    NodeState.LEFT: "dim",
}
_DASH = "-"


def plain(text: str) -> str:
    """Return text with what could steer a terminal replaced: names and reasons come from job files and nodes."""
    return "".join(c if c.isprintable() else "?" for c in text)


def duration(seconds: float) -> str:
    """Return seconds as people write them: ``8s``, ``2m05s``, ``3h07m``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    return f"{minutes // 60}h{minutes % 60:02d}m"


def estimate(status: JobStatus) -> str:
    """Return the running bits per byte with the half width of its 95 % interval, where there is one yet."""
    if status.bits_per_byte is None:
        return "no estimate yet"
    if status.bits_per_byte_half_width is None:
        return f"{status.bits_per_byte:.4f} bits/byte"
    return f"{status.bits_per_byte:.4f} ± {status.bits_per_byte_half_width:.4f} bits/byte"


def speed(tokens_per_second: float) -> str:
    """Return a rate for a table cell."""
    return f"{tokens_per_second:,.0f}" if tokens_per_second > 0 else _DASH


def line(status: JobStatus) -> str:
    """Return a job's status as one line."""
    parts = [f"{status.label}: {status.state.value}"]
    if status.shards:
        parts.append(f"{status.shards_done}/{status.shards} shards")
    if status.shards_quarantined:
        parts.append(f"{status.shards_quarantined} quarantined")
    if status.bits_per_byte is not None:
        parts.append(estimate(status))
    if not status.state.settled and status.eta_seconds is not None:
        parts.append(f"about {duration(status.eta_seconds)} left")
    if status.failure is not None:
        parts.append(status.failure.text)
    elif status.waiting:
        parts.append("waiting: " + "; ".join(status.waiting))
    return plain(", ".join(parts))


def render(status: JobStatus) -> RenderableType:
    """Return the live view of a job."""
    head = Text()
    head.append(plain(status.label), style="bold")
    head.append(f"  {status.job}  ", style="dim")
    head.append(status.state.value, style=_JOB_STYLE.get(status.state, ""))
    head.append(f"  after {duration(status.age_seconds)}")
    if not status.state.settled and status.eta_seconds is not None:
        head.append(f", about {duration(status.eta_seconds)} left")
    parts: list[RenderableType] = [head]
    if status.shards:
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(total=max(1, status.input_tokens), completed=status.input_tokens_done, width=40),
            f"{status.shards_done}/{status.shards} shards",
            f"{status.input_tokens_done:,}/{status.input_tokens:,} tokens",
            Text(estimate(status), style="bold"),
        )
        parts.append(bar)
    if status.nodes:
        parts.append(_nodes(status))
    parts += [Text(plain(f"waiting: {reason}"), style="yellow") for reason in status.waiting]
    if status.shards_quarantined:
        parts.append(Text(f"{status.shards_quarantined} shards are given up for now", style="red"))
    if status.failure is not None:
        parts.append(Text(plain(status.failure.text), style="red"))
    return Group(*parts)


def _nodes(status: JobStatus) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for title in ("node", "state", "doing"):
        table.add_column(title)
    for title in ("held", "done", "tokens", "tokens/s"):
        table.add_column(title, justify="right")
    for node in status.nodes:
        table.add_row(
            Text(plain(node.node)),
            Text(node.state.value, style=_NODE_STYLE.get(node.state, "")),
            Text(plain(node.activity) or _DASH),
            str(node.shards_held),
            str(node.shards_done),
            f"{node.tokens_done:,}",
            speed(node.tokens_per_second),
        )
    return table


class LiveView:
    """Shows statuses as they come; use it as a context manager.

    On a terminal the view is redrawn in place; elsewhere a line is written when the state, the waiting
    reasons or the progress by a tenth has changed.
    """

    def __init__(self, console: Console) -> None:
        """Write to ``console``."""
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=False) if console.is_terminal else None
        self._last: tuple[object, ...] | None = None

    def __enter__(self) -> LiveView:
        """Begin to draw."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the last view on the screen."""
        if self._live is not None:
            self._live.stop()

    def show(self, status: JobStatus) -> None:
        """Show one status."""
        if self._live is not None:
            self._live.update(render(status), refresh=True)
            return
        tenth = 10 * status.input_tokens_done // max(1, status.input_tokens)
        key = (status.state, status.waiting, tenth, status.shards_quarantined)
        if key != self._last:
            self._last = key
            self.note(line(status))

    def note(self, text: str) -> None:
        """Write a line that stays, above the view where there is one."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    async def follow(self, statuses: AsyncIterable[JobStatus]) -> JobStatus:
        """Show every status and return the last one."""
        last: JobStatus | None = None
        async for last in statuses:
            self.show(last)
        assert last is not None, "a watch yields the present status first"
        return last
