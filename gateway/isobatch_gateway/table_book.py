"""Decides which tables are routed by: the last good one of each source, by the source's name."""

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog
from isobatch_contracts.routing_table import RoutingTable, TableRejected, load, table_checksum


def refuse(current: RoutingTable | None, new: RoutingTable) -> str | None:
    """Why `new` may not follow `current`; None if it may."""
    if current is None or new.version > current.version:
        return None
    if new.version < current.version:
        return f"version {new.version} is lower than {current.version}, which is served"
    if table_checksum(new) != table_checksum(current):
        return f"version {new.version} came with two contents"
    return None


@dataclass(slots=True)
class Entry:
    """One source's last good table. `good_at`: when it last held what is served."""

    table: RoutingTable | None = None
    good_at: float = 0.0  # monotonic
    is_good: bool = False


@dataclass(slots=True)
class TableBook:
    """The tables of several sources."""

    rejected: int = 0
    entries: dict[str, Entry] = field(default_factory=dict)

    def offer(self, name: str, read: Callable[[], str | bytes]) -> bool:
        """Take what the source `name` holds now; whether the tables to route by have changed."""
        entry = self.entries.setdefault(name, Entry())
        entry.is_good = False
        try:
            table = load(read())
            problem = refuse(entry.table, table) or self._conflict(name, table)
        except (TableRejected, OSError) as exc:
            problem = str(exc)
        if problem is not None:
            self.rejected += 1
            structlog.get_logger().warning("table rejected", source=name, reason=problem[:500])
            return False
        entry.is_good = True
        has_changed = table != entry.table
        entry.table = table
        return has_changed

    def drop(self, name: str) -> None:
        """The source is gone."""
        self.entries.pop(name, None)

    def mark(self, name: str, now: float) -> None:
        """The source was seen to be as it was when it was read."""
        entry = self.entries[name]
        if entry.is_good:
            entry.good_at = now

    def refused(self) -> list[str]:
        """The sources whose last document was not taken: what stood in its way may be gone."""
        return [name for name, entry in self.entries.items() if not entry.is_good]

    def named(self) -> list[tuple[str, RoutingTable]]:
        """The tables to route by, by source; of two with one model, the first by name."""
        by_model: dict[str, tuple[str, RoutingTable]] = {}
        for name, entry in sorted(self.entries.items()):
            if entry.table is not None:
                by_model.setdefault(entry.table.model, (name, entry.table))
        return list(by_model.values())

    def ages(self, now: float) -> dict[str, float]:
        """By model: seconds since its source was last seen to hold what is served."""
        return {
            entry.table.model: max(0.0, now - entry.good_at)
            for _, entry in sorted(self.entries.items(), reverse=True)
            if entry.table is not None
        }

    def _conflict(self, name: str, table: RoutingTable) -> str | None:
        for other, entry in self.entries.items():
            if other != name and entry.table is not None and entry.table.model == table.model:
                return f"model {table.model!r} is served by {other} already"
        return None
