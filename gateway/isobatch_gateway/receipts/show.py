"""Decides how people are shown a receipt and a replay."""

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any


def show_receipt(document: dict[str, Any]) -> str:
    """The receipt as the API gives it, in words."""
    lines = [f"receipt      {document['receipt']}"]
    for entry in document["records"]:
        record = entry["record"]
        at = datetime.fromtimestamp(record["at"] / 1000, UTC).isoformat(timespec="milliseconds")
        lines.append(f"\n{record['kind']:<12} {at}  record {record['seq']} of {record['chain']}")
        lines += [f"  {name:<20} {value}" for name, value in _flat("", record["body"])]
    if document["suspect"]:
        lines.append("\nSUSPECT: the replica gave other bits at about that time; see above")
    return "\n".join(lines)


def show_replay(view: dict[str, Any]) -> str:
    """One verdict, with its reason."""
    lines = [f"{view['verdict']}: {view['receipt']}"]
    if view["replica"] is not None:
        lines.append(f"  run on {view['replica']}")
    if view["reason"] is not None:
        lines.append(f"  {view['reason']}")
    first = view["firstDifference"]
    if first is not None:
        lines.append(f"  first at token {first['token']} of sequence {first['sequence']}")
    return "\n".join(lines)


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else name, inner)
    elif isinstance(value, list) and value and isinstance(value[0], dict):
        for number, inner in enumerate(value):
            yield from _flat(f"{prefix}[{number}]", inner)
    elif value not in (None, [], {}):
        yield prefix, str(value)
