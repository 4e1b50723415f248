"""Decides what the command line of `isobatch receipt` means."""

import argparse
import os
import re
import time
from datetime import UTC, datetime
from pathlib import Path

from isobatch_contracts.fields import duration_seconds

GATEWAY, API_KEY = "ISOBATCH_GATEWAY", "ISOBATCH_API_KEY"
"""Environment variables: the gateway's address, and the key that it is asked with."""

_EXAMPLE = """\
examples:
  isobatch receipt get rcpt-0123…                            what was asked, served and answered
  isobatch receipt export --out march.jsonl                  all records, and the public keys
  isobatch receipt verify march.jsonl --public-keys march.keys.json
  isobatch receipt replay rcpt-0123… --request request.json  run it again and compare the bits
  isobatch receipt replay --since 24h --sample 200           the same for a sample

exit codes: 0 ok, 1 the answer is no (the reason is printed), 2 wrong use"""


def receipt_parser() -> argparse.ArgumentParser:
    """`isobatch receipt`."""
    parser = argparse.ArgumentParser(
        prog="isobatch receipt",
        description="Audit what was answered: receipts, their verification, and replay.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="get|verify|export|replay")
    add = _verb(verbs, "get", "show one receipt, and keep it in a file").add_argument
    add("id", help="the header X-Receipt-Id of the answer")
    add("--out", type=Path, metavar="FILE", help="keep it, for verify")
    _add_verify(_verb(verbs, "verify", "check signatures and chain by the public keys alone"))
    add = _verb(verbs, "export", "write all records (JSONL) and the public keys").add_argument
    add("--ledger", metavar="FILE|URL", help="default: that of `isobatch up`")
    add("--receipt-keys", type=Path, metavar="DIR", help="default: beside the file, FILE.keys")
    add("--out", type=Path, required=True, metavar="FILE.jsonl")
    _add_replay(_verb(verbs, "replay", "run answers again and compare their bits"))
    return parser


def _add_verify(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("what", metavar="FILE|ID", help="an export, a receipt in a file, or a receipt's id")
    add("--public-keys", type=Path, metavar="FILE", help="the keys that you trust")
    add(
        "--checkpoint",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an earlier end of the chain, or a receipt, that must be in it; repeatable",
    )


def _add_replay(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("id", nargs="?", help="the header X-Receipt-Id of the answer")
    add("--request", type=Path, metavar="FILE", help="the request, where only digests are kept")
    add("--since", type=_since, metavar="TIME", help="all that ended since: 24h, 2026-03-01")
    add("--sample", type=_count, metavar="N", help="only so many of them, drawn at random")
    add(
        "--requests",
        type=Path,
        metavar="FILE.jsonl",
        help='the requests: lines of {"receipt": ID, "request": {…}}',
    )
    add("--only-given", action="store_true", help="only those that --requests has")
    add("--at-once", type=_count, default=4, metavar="N", help="default %(default)s")


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, text: str
) -> argparse.ArgumentParser:
    parser = verbs.add_parser(
        name,
        help=text,
        description=text.capitalize() + ".",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--gateway",
        default=os.environ.get(GATEWAY, "http://127.0.0.1:8080"),
        metavar="URL",
        help=f"default %(default)s, or {GATEWAY}; the API key is taken from {API_KEY}",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    return parser


def _since(text: str) -> int:
    """Milliseconds since 1970 of a time, or of a length of time before now."""
    if re.fullmatch(r"([0-9]+(ms|[smhd]))+", text):
        return max(0, int((time.time() - duration_seconds(text)) * 1000))
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        said = f"{text!r} is no time; write 24h, 2026-03-01 or 2026-03-01T12:00:00Z"
        raise argparse.ArgumentTypeError(said) from None
    return int((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return int(text)
