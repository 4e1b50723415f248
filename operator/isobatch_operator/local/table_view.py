"""Performs the display of an instance: a live table on a terminal, plain lines elsewhere."""

import time
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.table import Table

from isobatch_operator.local.state import LocalState, ReplicaView
from isobatch_operator.status import Phase

_COLOURS = {
    Phase.PENDING: "dim",
    Phase.STARTING: "yellow",
    Phase.READY: "green",
    Phase.UNREADY: "red",
    Phase.REFUSED: "red",
    Phase.BACKING_OFF: "red",
    Phase.STOPPING: "dim",
}


def rows(state: LocalState) -> list[tuple[str, ReplicaView]]:
    """Every process of `state` with the pool it is of."""
    pools = [(pool.name.value, view) for pool in state.pools for view in pool.replicas]
    return [*pools, *([("gateway", state.gateway)] if state.gateway else [])]


def detail_of(view: ReplicaView, now: float) -> str:
    """What there is to say beside the phase, in one line."""
    detail = view.detail
    if view.restart_at is not None:
        wait = max(0, round(view.restart_at - now))
        detail = f"{detail}; restart in {wait} s ({view.failures} in a row)"
    return detail


def state_table(state: LocalState, now: float) -> Table:
    """The table of `state` at the time `now`."""
    table = Table(box=None, pad_edge=False)
    for heading in ("POOL", "REPLICA", "STATE", "SINCE"):
        table.add_column(heading, no_wrap=True)
    table.add_column("DETAIL", overflow="fold")  # the one that wraps on a narrow terminal
    for pool, view in rows(state):
        colour = _COLOURS[view.phase]
        since = "" if view.since is None else f"{max(0, round(now - view.since))} s"
        table.add_row(
            pool, view.name, f"[{colour}]{view.phase.value}[/]", since, _plain(detail_of(view, now))
        )
    return table


class Progress:
    """Shows the states of an instance as they come. Use as a context manager."""

    def __init__(self, out: TextIO) -> None:
        """A table if `out` is a terminal."""
        self._console = Console(file=out, highlight=False)
        # The caller refreshes: a thread of ours would tie the children's life to it.
        self._live = (
            Live(console=self._console, auto_refresh=False, transient=False)
            if self._console.is_terminal
            else None
        )
        self._shown: dict[str, str] = {}

    def __enter__(self) -> "Progress":
        """Begin."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the last table on the screen."""
        self.stop()

    def stop(self) -> None:
        """From now on plain lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, state: LocalState) -> None:
        """Bring the display up to date."""
        if self._live is not None:
            self._remember(state)
            self._live.update(state_table(state, time.time()), refresh=True)
            return
        for line in self._remember(state):
            self._console.print(line, markup=False, soft_wrap=True)

    def _remember(self, state: LocalState) -> list[str]:
        """The lines that say what is new since the last state."""
        now = {
            view.name: f"{view.phase.value}|{view.failures}|{view.blocked}"
            for _, view in rows(state)
        }
        stamp = time.strftime("%H:%M:%S")
        lines = [
            f"{stamp} {view.name}: {view.phase.value}"
            + (f" ({detail})" if (detail := detail_of(view, time.time())) else "")
            for _, view in rows(state)
            if self._shown.get(view.name) != now[view.name]
        ]
        problems = "\n".join(state.manifest_problems)
        if problems != self._shown.get("", "") and problems:
            lines += [f"{stamp} the edited manifest is refused, the old one stays:"]
            lines += [f"  {problem}" for problem in state.manifest_problems]
        self._shown = {**now, "": problems}
        return lines


def _plain(text: str) -> str:
    return text.replace("[", r"\[")
