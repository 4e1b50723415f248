"""Performs: the commands `isobatch gateway` and `isobatch key`."""

import argparse
import asyncio
import dataclasses
import gc
import json
import os
import re
import resource
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path

import uvloop
from isobatch_cli.state_folder import state_root
from isobatch_contracts.fields import duration_seconds
from isobatch_contracts.resource import TierLimits
from isobatch_contracts.tiers import Tier
from pydantic import TypeAdapter, ValidationError

from isobatch_gateway import keys, logs
from isobatch_gateway.app import create_app
from isobatch_gateway.errors import SettingsInvalid
from isobatch_gateway.keys import Key, KeyFile
from isobatch_gateway.receipts.keeper import keys_beside
from isobatch_gateway.runtime import Runtime
from isobatch_gateway.server import SIGNALS, Stopping, listen, server_for
from isobatch_gateway.settings import Bounds, ReceiptSettings, Settings, Timeouts

_GATEWAY_EXAMPLE = """\
example:
  isobatch gateway --tables tables/ --keys keys.json --secret gateway.secret --port 8080
  curl http://127.0.0.1:8080/v1/models"""

_KEY_EXAMPLE = """\
example:
  isobatch key create --file keys.json --id ci --tenant team-a --tier strict
  isobatch key list --file keys.json
  isobatch key revoke --file keys.json ci"""

_TIMEOUT_HELP = {
    "connect": "to connect to a replica",
    "first_byte": "until the first byte of an answer (an unstreamed one: all of it)",
    "idle": "between two reads of an answer",
    "total": "for a whole request",
    "write": "that a client may go without reading",
    "head": "for a request's headers",
    "body": "between two reads of a request's body",
    "keep_alive": "that a client's connection may be idle",
    "drain": "for open answers after SIGTERM",
    "check": "for a readiness check",
    "probe": "for the one-token probe of a replica in doubt",
    "suspect": "of silence after which a replica that owes an answer is probed",
}
_BOUND_HELP = {
    "body_bytes": "largest request body",
    "url_bytes": "longest URL",
    "header_bytes": "most bytes of headers",
    "headers": "most headers",
}


def gateway(argv: list[str]) -> int:
    """Run the gateway until it is told to stop. 0: stopped as it should; 1: could not start."""
    arguments = _gateway_parser().parse_args(argv)
    try:
        settings = _settings(arguments)
        logs.configure(settings.log_level)
        if settings.tables is not None and not settings.tables.is_dir():
            raise SettingsInvalid(f"--tables {settings.tables} is no folder; create it first")
        runtime = Runtime(settings)
        with listen(settings.host, settings.port) as listener:
            _raise_file_limit()
            _calm_collector()
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                return runner.run(_serve(runtime, listener))
    except (SettingsInvalid, ValueError) as exc:
        print(f"isobatch gateway: {exc}", file=sys.stderr)  # noqa: T201  # a command's own words
        return 1


async def _serve(runtime: Runtime, listener: socket.socket) -> int:
    await runtime.connect()
    server = server_for(create_app(runtime), runtime.settings)

    def drain() -> None:
        runtime.is_draining = True

    stopping = Stopping(server, drain, lambda: not runtime.open, runtime.end_all, runtime.settings)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stopping.signalled)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    print(f"isobatch gateway on http://{address}:{port}", flush=True)  # noqa: T201
    await server.serve(sockets=[listener])
    return 1 if stopping.was_forced else 0


def key(argv: list[str]) -> int:
    """Create, list and revoke API keys."""
    arguments = _key_parser().parse_args(argv)
    try:
        match arguments.verb:
            case "create":
                return _create(arguments)
            case "list":
                return _list(arguments)
            case _:
                return _revoke(arguments)
    except SettingsInvalid as exc:
        print(f"isobatch key: {exc}", file=sys.stderr)  # noqa: T201
        return 1


def _create(arguments: argparse.Namespace) -> int:
    token = keys.new_token()
    try:
        new = Key(
            id=arguments.id,
            tenant=arguments.tenant or arguments.id,
            hash=keys.hash_token(token),
            tiers=tuple(arguments.tier or Tier),
            models=tuple(arguments.model) if arguments.model else None,
            default_tier=arguments.default_tier,
            limits=_limits(arguments.limits),
            created=datetime.now(UTC),
        )
    except ValidationError as exc:
        problem = exc.errors(include_url=False)[0]
        raise SettingsInvalid(f"{problem['loc'][0]}: {problem['msg']}") from exc
    _write(arguments.file, keys.add(_read(arguments.file), new))
    if arguments.output == "json":
        print(json.dumps({"id": new.id, "tenant": new.tenant, "key": token}))  # noqa: T201
    else:
        print(f"key {new.id} of tenant {new.tenant}, shown this once:\n{token}")  # noqa: T201
    return 0


def _list(arguments: argparse.Namespace) -> int:
    known = _read(arguments.file).keys
    if arguments.output == "json":
        shown = [k.model_dump(mode="json", exclude={"hash"}, exclude_none=True) for k in known]
        print(json.dumps(shown, indent=2))  # noqa: T201
        return 0
    print(f"{'ID':<20} {'TENANT':<20} {'TIERS':<28} {'DEFAULT':<9} MODELS")  # noqa: T201
    for k in known:
        tiers = ",".join(tier.value for tier in k.tiers)
        models = "all" if k.models is None else ",".join(k.models)
        default = k.default_tier.value if k.default_tier else "-"
        print(f"{k.id:<20} {k.tenant:<20} {tiers:<28} {default:<9} {models}")  # noqa: T201
    return 0


def _revoke(arguments: argparse.Namespace) -> int:
    left = keys.remove(_read(arguments.file), arguments.id)
    if left is None:
        raise SettingsInvalid(f"there is no key {arguments.id!r} in {arguments.file}")
    _write(arguments.file, left)
    print(f"key {arguments.id} revoked; running gateways refuse it within a second")  # noqa: T201
    return 0


def _read(path: Path) -> KeyFile:
    try:
        return keys.parse(path.read_bytes())
    except FileNotFoundError:
        return KeyFile()
    except OSError as exc:
        raise SettingsInvalid(f"keys file {path}: {exc.strerror}") from exc


def _write(path: Path, file: KeyFile) -> None:
    """Replace `path` in one step, readable by its owner alone."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(file.model_dump_json(indent=2, exclude_none=True) + "\n")
        beside.replace(path)
    except OSError as exc:
        raise SettingsInvalid(f"keys file {path}: {exc.strerror}") from exc


def _limits(text: str | None) -> dict[Tier, TierLimits]:
    if text is None:
        return {}
    try:
        return TypeAdapter(dict[Tier, TierLimits]).validate_json(text)
    except ValidationError as exc:
        raise SettingsInvalid(f"--limits: {exc.errors(include_url=False)[0]['msg']}") from exc


def _settings(arguments: argparse.Namespace) -> Settings:
    given = vars(arguments)
    watched = os.environ.get("ISOBATCH_WATCH_NAMESPACES", "")
    return Settings(
        tables=arguments.tables,
        namespaces=tuple(sorted({n.strip() for n in watched.split(",") if n.strip()})),
        keys=arguments.keys,
        secret=arguments.secret,
        receipts=_receipts(arguments),
        host=arguments.host,
        port=arguments.port,
        drain_delay=arguments.drain_delay,
        check_interval=arguments.check_interval,
        log_level=arguments.log_level,
        access_log=arguments.access_log,
        timeouts=Timeouts(**{name: given[f"{name}_timeout"] for name in _TIMEOUT_HELP}),
        bounds=Bounds(**{name: given[f"max_{name}"] for name in _BOUND_HELP}),
    )


def _receipts(arguments: argparse.Namespace) -> ReceiptSettings | None:
    if not arguments.keeps_receipts:
        return None
    ledger = arguments.receipts or str(state_root(os.environ) / "gateway" / "receipts.db")
    keys = arguments.receipt_keys
    if keys is None and "://" in ledger:
        raise SettingsInvalid(
            "--receipts names a database: give --receipt-keys too, the folder of its keys, which "
            "all gateways of the database share"
        )
    chain = arguments.receipt_chain or f"{socket.gethostname()[:50]}-{arguments.port}"
    return ReceiptSettings(ledger, keys or keys_beside(Path(ledger)), chain)


def _gateway_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isobatch gateway",
        description="The OpenAI-compatible gateway in front of the strict and throughput pools.",
        epilog=_GATEWAY_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--tables", type=Path, help="folder of routing tables, one *.json a service"
    )
    source.add_argument(
        "--watch",
        action="store_true",
        help="take tables and replicas from the Kubernetes cluster (ISOBATCH_WATCH_NAMESPACES: "
        "those of some namespaces, by commas)",
    )
    add("--keys", type=Path, help="file of API keys (isobatch key); without it everybody may ask")
    add(
        "--secret",
        type=Path,
        help="file of the secret behind cache salts and seeds; made if absent",
    )
    _add_receipts(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default %(default)s)")
    add("--port", type=int, default=8080, help="port, 0 for any (default %(default)s)")
    add("--log-level", choices=logs.LEVEL_NAMES, default="info", help="default %(default)s")
    add("--no-access-log", dest="access_log", action="store_false", help="no line per request")
    add("--drain-delay", type=_seconds, default=0.0, help="that readyz fails before the drain")
    add("--check-interval", type=_seconds, default=1.0, help="between two looks at a replica")
    times = parser.add_argument_group("timeouts (500ms, 30s, 10m)")
    for field in dataclasses.fields(Timeouts):
        flag = f"--{field.name.replace('_', '-')}-timeout"
        text = f"{_TIMEOUT_HELP[field.name]} (default {field.default:g}s)"
        times.add_argument(flag, type=_seconds, default=field.default, help=text, metavar="TIME")
    sizes = parser.add_argument_group("bounds")
    for field in dataclasses.fields(Bounds):
        flag = f"--max-{field.name.replace('_', '-')}"
        text = f"{_BOUND_HELP[field.name]} (default {field.default})"
        sizes.add_argument(flag, type=_positive, default=field.default, help=text, metavar="N")
    return parser


def _add_receipts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("receipts").add_argument
    add(
        "--receipts",
        metavar="FILE|URL",
        help="the ledger: a file of SQLite, or postgresql://… where there are several gateways "
        "(default: gateway/receipts.db in the state folder)",
    )
    add(
        "--receipt-keys",
        type=Path,
        metavar="DIR",
        help="folder of the keys that sign, encrypt and make digests; made if absent "
        "(default: beside the file, FILE.keys)",
    )
    add(
        "--receipt-chain",
        type=_chain,
        metavar="NAME",
        help="this gateway's chain of records, and no other's (default: host's name and port)",
    )
    add(
        "--no-receipts",
        dest="keeps_receipts",
        action="store_false",
        help="keep none: strict and verified are then answered without",
    )


def _key_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isobatch key",
        description="API keys of the gateway. The file holds hashes; a key is shown once.",
        epilog=_KEY_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="create|list|revoke")
    for verb, text in (
        ("create", "make a key and show it"),
        ("list", "list the keys, without the keys"),
        ("revoke", "remove a key"),
    ):
        sub = verbs.add_parser(
            verb,
            help=text,
            description=text,
            epilog=_KEY_EXAMPLE,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--file", type=Path, default=Path("keys.json"), help="default %(default)s")
        sub.add_argument("-o", dest="output", choices=("table", "json"), default="table")
        if verb == "create":
            _add_create(sub)
        elif verb == "revoke":
            sub.add_argument("id", help="id of the key")
    return parser


def _add_create(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--id", required=True, help="a name for the key, for lists and logs")
    add("--tenant", help="whose requests share a prefix cache (default: the id)")
    add("--tier", type=Tier, choices=list(Tier), action="append", help="allowed tier; repeatable")
    add("--model", action="append", help="allowed model; repeatable (default: all)")
    add("--default-tier", type=Tier, choices=list(Tier), help="for requests that declare none")
    add("--limits", help="""JSON by tier: '{"strict": {"requestsPerMinute": 60}}'""")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = duration_seconds(text)
        if not seconds and not text.startswith("0"):
            raise argparse.ArgumentTypeError(f"{text!r} is no time; write 500ms, 30s or 10m") from (
                None
            )
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 500ms, 30s or 10m")
    return seconds


def _chain(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,63}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name: 1 to 63 letters, digits and ._-")
    return text


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)


def _calm_collector() -> None:
    """Keep the garbage collector from walking everything that was imported, in mid-request.

    A request leaves almost no cycles; with the default thresholds its collections were the longest
    pauses of the loop.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _raise_file_limit() -> None:
    """Two descriptors a request: the usual soft limit of 1024 would end at 500 streams."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
