"""Performs: reads the routing tables of a folder and keeps the last good one of each file."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from isobatch_contracts.routing_table import RoutingTable, TableRejected, load, table_checksum

Stamp = tuple[int, int, int]


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
class _File:
    stamp: Stamp | None = None
    table: RoutingTable | None = None
    good_at: float = 0.0  # monotonic: when the file last held what is served
    is_good: bool = False


@dataclass(slots=True)
class TableSource:
    """The tables of `folder`: every `*.json` in it is one service's."""

    folder: Path
    rejected: int = 0
    _files: dict[str, _File] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)

    def poll(self, now: float) -> bool:
        """Look at the folder; whether the tables to route by have changed."""
        try:
            found = {e.name: _stamp(e) for e in os.scandir(self.folder) if _is_table(e)}
        except OSError as exc:
            structlog.get_logger().warning("tables folder unreadable", error=str(exc))
            return False
        has_changed = self._forget(set(found))
        for name, stamp in sorted(found.items()):
            file = self._files.setdefault(name, _File())
            if file.stamp != stamp:
                file.stamp = stamp
                has_changed |= self._read(name, file)
            if file.is_good:
                file.good_at = now
        return has_changed

    def tables(self) -> list[RoutingTable]:
        """The tables to route by; of two with one model, the first by file name."""
        by_model: dict[str, RoutingTable] = {}
        for _, file in sorted(self._files.items()):
            if file.table is not None:
                by_model.setdefault(file.table.model, file.table)
        return list(by_model.values())

    def ages(self, now: float) -> dict[str, float]:
        """By model: seconds since its file was last seen to hold what is served."""
        return {
            file.table.model: max(0.0, now - file.good_at)
            for _, file in sorted(self._files.items(), reverse=True)
            if file.table is not None
        }

    def _read(self, name: str, file: _File) -> bool:
        file.is_good = False
        try:
            table = load((self.folder / name).read_bytes())
            problem = refuse(file.table, table) or self._conflict(name, table)
        except (TableRejected, OSError) as exc:
            problem = str(exc)
        if problem is not None:
            self.rejected += 1
            structlog.get_logger().warning("table rejected", file=name, reason=problem[:500])
            return False
        file.is_good = True
        has_changed = table != file.table
        file.table = table
        return has_changed

    def _conflict(self, name: str, table: RoutingTable) -> str | None:
        for other, file in self._files.items():
            if other != name and file.table is not None and file.table.model == table.model:
                return f"model {table.model!r} is served by {other} already"
        return None

    def _forget(self, found: set[str]) -> bool:
        """Drop what two looks in a row missed: a writer may replace a file in two steps."""
        gone = {name for name in self._files if name not in found}
        dropped = gone & self._missing
        for name in dropped:
            del self._files[name]
        if dropped:
            for file in self._files.values():
                if not file.is_good:
                    file.stamp = None  # what stood in its way may be gone
        self._missing = gone - dropped
        return bool(dropped)


def _is_table(entry: "os.DirEntry[str]") -> bool:
    return entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file()


def _stamp(entry: "os.DirEntry[str]") -> Stamp:
    stat = entry.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
