"""Keeps plans between starts; one that no longer matches is not found, and proved anew."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from isobatch_kernels.plan import Plan
from pydantic import ValidationError

Key = tuple[str, str, str]
"""(operator, shape, tree) of what must be proved."""


def plan_file(folder: Path, wanted: Plan) -> Path:
    """Where the plan for `wanted` (a plan without operators proved) is kept."""
    body = wanted.model_dump(exclude={"operators", "probe"})
    name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32]
    return folder / f"{name}.json"


def load_plan(path: Path, wanted: Plan, operators: set[Key]) -> Plan | None:
    """The kept plan if it is whole, of the same environment, and proves exactly `operators`."""
    try:
        plan = Plan.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None
    if plan.model_copy(update={"operators": (), "probe": ""}) != wanted:
        return None
    proved = {(o.operator, o.shape, o.tree) for o in plan.operators}
    return plan if proved == operators else None


def kept_plans(folder: Path) -> Iterator[tuple[Path, Plan]]:
    """Every whole plan in `folder`, with its file; what is none is passed over."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield path, Plan.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            continue


def save_plan(path: Path, plan: Plan) -> None:
    """Write `plan`, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".draft")
    draft.write_text(plan.model_dump_json(indent=1))
    draft.replace(path)
