"""Performs the command `isobatch numerics explain`: finds a fingerprint and says what it fixes."""

import argparse
import json
import os
import re
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

from isobatch_cli.state_folder import state_root
from isobatch_contracts import routing_table
from isobatch_contracts.numerics import NUMERICS_PATH, Certified
from isobatch_contracts.tiers import PoolName
from isobatch_kernels.plan import Plan

from isobatch_worker.cache import default_cache_dir, plans_dir
from isobatch_worker.plan_cache import kept_plans
from isobatch_worker.plan_view import Fixed, explain

_EXAMPLE = """example:
  isobatch numerics explain sha256:3f9a…
  isobatch numerics explain 3f9a51c2 --replica http://10.0.0.7:8000
"""
_FINGERPRINT = re.compile(r"(?:sha256:)?([0-9a-f]{8,64})")
_TIMEOUT_SECONDS = 3.0


def numerics(argv: list[str]) -> int:
    """Say what fixes the bits of a fingerprint. 0 found, 1 not known here, 2 wrong use."""
    options = _parser().parse_args(argv)
    match = _FINGERPRINT.fullmatch(options.fingerprint)
    if match is None:
        print(  # noqa: T201  # a command speaks
            f"isobatch numerics explain: {options.fingerprint!r} is no fingerprint: expected "
            "sha256: and 64 hex digits, or the first 8 or more of them",
            file=sys.stderr,
        )
        return 2
    replicas = [*options.replica, *_routed(os.environ)]
    plans = plans_dir(default_cache_dir())
    found = {f.fingerprint: f for f in _known(plans, replicas, "sha256:" + match[1])}
    if len(found) == 1:
        (fixed,) = found.values()
        sys.stdout.write(_json(fixed) if options.output == "json" else explain(fixed))
        return 0
    said = (
        f"{options.fingerprint} is the beginning of {len(found)}: {', '.join(sorted(found))}"
        if found
        else f"{options.fingerprint} is not known here: looked at the plans in {plans} and at "
        f"{len(replicas)} running replicas; name one that serves it by --replica URL"
    )
    print(f"isobatch numerics explain: {said}", file=sys.stderr)  # noqa: T201  # as above
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isobatch numerics",
        description="Say what fixes the bits.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    one = commands.add_parser(
        "explain",
        help="say in words what a numerics fingerprint stands for",
        description="Say in words what a numerics fingerprint stands for; it is looked for among "
        "kept plans and the replicas of this machine's services.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    one.add_argument("fingerprint", metavar="FINGERPRINT", help="sha256:…, or how it begins")
    one.add_argument(
        "--replica", action="append", default=[], metavar="URL", help="a worker to ask as well"
    )
    one.add_argument("-o", "--output", choices=("table", "json"), default="table", help="format")
    return parser


def _known(plans: Path, replicas: list[str], beginning: str) -> Iterator[Fixed]:
    """What is known of fingerprints that begin so; a kept plan says more, and comes last."""
    for url in dict.fromkeys(replicas):
        certified = _ask(url)
        if certified is not None and certified.fingerprint.startswith(beginning):
            trees = tuple((o.operator, o.shape, o.reference) for o in certified.operators)
            yield Fixed(
                certified.fingerprint,
                f"the running replica {url}",
                certified.model_digest,
                certified.device,
                certified.versions,
                trees,
            )
    for path, plan in kept_plans(plans):
        if plan.fingerprint.startswith(beginning):
            yield _of_plan(path, plan)


def _of_plan(path: Path, plan: Plan) -> Fixed:
    trees = tuple((o.operator, o.shape, o.tree) for o in plan.operators)
    source, device = f"the kept plan {path}", plan.arithmetic.device
    return Fixed(plan.fingerprint, source, plan.model_digest, device, plan.versions, trees, plan)


def _ask(url: str) -> Certified | None:
    """What the worker at `url` says of its numerics; None if it is not there or not certified."""
    if not url.startswith(("http://", "https://")):
        return None
    try:
        request = url.rstrip("/") + NUMERICS_PATH
        with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as answer:  # noqa: S310  # http alone, see above
            return Certified.model_validate_json(answer.read())
    except (OSError, ValueError):
        return None


def _routed(environ: Mapping[str, str]) -> Iterator[str]:
    """The strict replicas in the routing tables of `isobatch up` on this machine."""
    for path in sorted(state_root(environ).glob("*/tables/table.json")):
        try:
            table = routing_table.load(path.read_bytes())
        except (OSError, routing_table.TableRejected):
            continue
        for revision in table.revisions:
            if revision.pool is PoolName.STRICT:
                yield from (endpoint.url for endpoint in revision.endpoints)


def _json(fixed: Fixed) -> str:
    body = {
        "fingerprint": fixed.fingerprint,
        "source": fixed.source,
        "modelDigest": fixed.model_digest,
        "device": fixed.device,
        "versions": dict(fixed.versions),
        "trees": [
            {"operator": operator, "shape": shape, "tree": tree}
            for operator, shape, tree in fixed.trees
        ],
    }
    if fixed.plan is not None:
        body |= {
            "arithmetic": fixed.plan.arithmetic.model_dump(),
            "sampler": fixed.plan.sampler,
            "settings": fixed.plan.settings,
            "dtype": fixed.plan.dtype,
            "probe": fixed.plan.probe,
        }
    return json.dumps(body, indent=2, ensure_ascii=False) + "\n"
