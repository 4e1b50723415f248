"""Performs: reads the routing tables of a folder and keeps the last good one of each file."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import structlog
from isobatch_contracts.routing_table import RoutingTable

from isobatch_gateway.table_book import TableBook

Stamp = tuple[int, int, int]


class Source(Protocol):
    """Where tables come from."""

    @property
    def rejected(self) -> int:
        """Documents that were no acceptable table, so far."""

    def poll(self, now: float) -> bool:
        """Take in what is new; whether the tables to route by have changed."""

    def tables(self) -> list[RoutingTable]:
        """The tables to route by, each replica with its address."""

    def ages(self, now: float) -> dict[str, float]:
        """By model: seconds since its source was last seen to hold what is served."""


@dataclass(slots=True)
class TableSource:
    """The tables of `folder`: every `*.json` in it is one service's."""

    folder: Path
    _book: TableBook = field(default_factory=TableBook)
    _stamps: dict[str, Stamp | None] = field(default_factory=dict)
    _missing: set[str] = field(default_factory=set)

    @property
    def rejected(self) -> int:
        """Documents that were no acceptable table, so far."""
        return self._book.rejected

    def poll(self, now: float) -> bool:
        """Look at the folder; whether the tables to route by have changed."""
        try:
            found = {e.name: _stamp(e) for e in os.scandir(self.folder) if _is_table(e)}
        except OSError as exc:
            structlog.get_logger().warning("tables folder unreadable", error=str(exc))
            return False
        has_changed = self._forget(set(found))
        for name, stamp in sorted(found.items()):
            if self._stamps.get(name) != stamp:
                self._stamps[name] = stamp
                has_changed |= self._book.offer(name, (self.folder / name).read_bytes)
            self._book.mark(name, now)
        return has_changed

    def tables(self) -> list[RoutingTable]:
        """The tables to route by; of two with one model, the first by file name."""
        return [table for _, table in self._book.named()]

    def ages(self, now: float) -> dict[str, float]:
        """By model: seconds since its file was last seen to hold what is served."""
        return self._book.ages(now)

    def _forget(self, found: set[str]) -> bool:
        """Drop what two looks in a row missed: a writer may replace a file in two steps."""
        gone = {name for name in self._stamps if name not in found}
        dropped = gone & self._missing
        for name in dropped:
            del self._stamps[name]
            self._book.drop(name)
        if dropped:
            for name in self._book.refused():
                self._stamps[name] = None  # what stood in its way may be gone
        self._missing = gone - dropped
        return bool(dropped)


def _is_table(entry: "os.DirEntry[str]") -> bool:
    return entry.name.endswith(".json") and not entry.name.startswith(".") and entry.is_file()


def _stamp(entry: "os.DirEntry[str]") -> Stamp:
    stat = entry.stat()
    return stat.st_mtime_ns, stat.st_size, stat.st_ino
