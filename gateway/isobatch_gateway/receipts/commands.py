"""Performs: the command `isobatch receipt`: get, verify, export and replay."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import orjson
from isobatch_cli.state_folder import state_root

from isobatch_gateway.receipts.bulk import Failed, asked, replay_many
from isobatch_gateway.receipts.chain import Verifier, line, lines_of_receipt, pinned_by, split
from isobatch_gateway.receipts.keeper import PUBLIC_KEYS, keys_beside
from isobatch_gateway.receipts.options import API_KEY, receipt_parser
from isobatch_gateway.receipts.show import show_receipt, show_replay
from isobatch_gateway.receipts.signing import KeysInvalid, Trusted
from isobatch_gateway.receipts.store import Store, StoreFailed

_SECONDS = 900.0  # a replay takes as long as the answer did


def receipt(argv: list[str]) -> int:
    """0: ok; 1: the answer is no; 2: wrong use."""
    arguments = receipt_parser().parse_args(argv)
    try:
        return _VERBS[arguments.verb](arguments)
    except (Failed, KeysInvalid, StoreFailed, OSError) as exc:
        print(f"isobatch receipt: {exc}", file=sys.stderr)  # noqa: T201  # a command's own words
        return 1
    except httpx.HTTPError as exc:
        where = f"{arguments.gateway} does not answer ({type(exc).__name__})"
        print(f"isobatch receipt: {where}; see --gateway", file=sys.stderr)  # noqa: T201
        return 1


def _get(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        document = asked(client.get(f"/isobatch/v1/receipts/{arguments.id}"))
    if arguments.out is not None:
        arguments.out.write_bytes(document + b"\n")
    if arguments.output == "json":
        print(document.decode())  # noqa: T201
    else:
        print(show_receipt(orjson.loads(document)))  # noqa: T201
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    path = Path(arguments.what)
    trusted = None
    if arguments.public_keys is not None:
        trusted = Trusted.read(arguments.public_keys.read_bytes())
    if path.exists():
        if trusted is None:
            raise Failed("--public-keys FILE is needed: the keys that you trust")
        return _tell(_walked(path, trusted, arguments.checkpoint), arguments.output)
    if not arguments.what.startswith("rcpt-"):
        raise Failed(f"{arguments.what} is neither a file nor the id of a receipt")
    with _client(arguments) as client:
        document = asked(client.get(f"/isobatch/v1/receipts/{arguments.what}"))
        if trusted is None:
            said = "the keys are the gateway's own word; name those that you trust: --public-keys"
            print(f"isobatch receipt: {said}", file=sys.stderr)  # noqa: T201
            trusted = Trusted.read(asked(client.get("/isobatch/v1/receipt-keys")))
    verifier = Verifier(trusted, is_excerpt=True)
    _take(verifier, lines_of_receipt(document))
    return _tell(verifier, arguments.output)


def _walked(path: Path, trusted: Trusted, checkpoints: list[Path]) -> Verifier:
    """A verifier that has taken all of the export or receipt in `path`."""
    with path.open("rb") as file:
        is_excerpt = file.read(12).startswith(b'{"receipt":"')
    verifier = Verifier(trusted, is_excerpt=is_excerpt)
    for checkpoint in checkpoints:
        for seq, chain, digest in _pinned(checkpoint, trusted):
            verifier.seek(chain, seq, digest)
    if is_excerpt:
        _take(verifier, lines_of_receipt(path.read_bytes()))
    else:
        with path.open("rb") as file:
            _take(verifier, file)
    return verifier


def _take(verifier: Verifier, lines: Iterable[bytes]) -> None:
    for number, raw in enumerate(lines, 1):
        verifier.take(number, raw)
    verifier.end()


def _pinned(path: Path, trusted: Trusted) -> Iterator[tuple[int, str, str]]:
    """(seq, chain, digest) of what the signed records in `path` are, or name."""
    raw = path.read_bytes()
    lines = lines_of_receipt(raw) if raw.startswith(b'{"receipt":"') else raw.splitlines()
    for each in lines:
        payload, signature = split(each)
        record = orjson.loads(payload)
        if signature and not trusted.is_signed(record["key"], payload, signature):
            raise Failed(f"{path} is signed by none of the trusted keys")
        if signature:
            yield from pinned_by(record, payload)


def _tell(verifier: Verifier, output: str) -> int:
    findings = verifier.findings
    if output == "json":
        said = {
            "verified": not findings,
            "records": verifier.records,
            "receipts": verifier.receipts,
            "heads": {c: {"seq": h.seq, "digest": h.digest} for c, h in verifier.heads.items()},
            "problems": [finding._asdict() for finding in findings],
        }
        print(orjson.dumps(said, option=orjson.OPT_INDENT_2).decode())  # noqa: T201
        return 1 if findings else 0
    for finding in findings:
        print(f"record {finding.seq} of chain {finding.chain} {finding.problem}")  # noqa: T201
    counted = f"{verifier.records} records, {verifier.receipts} receipts"
    if findings:
        print(f"NOT verified: {len(findings)} problems in {counted}")  # noqa: T201
        return 1
    print(f"verified: {counted}")  # noqa: T201
    return 0


def _export(arguments: argparse.Namespace) -> int:
    ledger = arguments.ledger or _local_ledger()
    keys = arguments.receipt_keys or (None if "://" in ledger else keys_beside(Path(ledger)))
    if "://" not in ledger and not Path(ledger).exists():
        raise Failed(f"there is no ledger {ledger}; name it with --ledger")
    store, count, heads = Store(ledger), 0, []
    with arguments.out.open("wb") as file:
        for chain in store.chains():
            last = None
            for record in store.walk(chain):
                file.write(line(record.payload, record.signature) + b"\n")
                count += 1
                last = record if record.signature else last
            if last is not None:
                heads.append(line(last.payload, last.signature) + b"\n")
    store.close()
    head = arguments.out.with_suffix(".checkpoint.jsonl")
    head.write_bytes(b"".join(heads))
    print(f"{count} records to {arguments.out}; its end, to be kept elsewhere: {head}")  # noqa: T201
    if keys is not None and (keys / PUBLIC_KEYS).exists():
        copied = arguments.out.with_suffix(".keys.json")
        copied.write_bytes((keys / PUBLIC_KEYS).read_bytes())
        print(f"public keys: {copied}")  # noqa: T201
    return 0


def _replay(arguments: argparse.Namespace) -> int:
    if (arguments.id is None) == (arguments.since is None):
        raise Failed("name one receipt, or say --since: exactly one of both")
    with _client(arguments) as client:
        if arguments.id is None:
            return replay_many(client, arguments)
        given = b"" if arguments.request is None else arguments.request.read_bytes()
        answer = client.post(f"/isobatch/v1/receipts/{arguments.id}/replay", content=given)
        document = asked(answer)
    if arguments.output == "json":
        print(document.decode())  # noqa: T201
    else:
        print(show_replay(orjson.loads(document)))  # noqa: T201
    return 0 if orjson.loads(document)["verdict"] == "Reproduced" else 1


def _client(arguments: argparse.Namespace) -> httpx.Client:
    key = os.environ.get(API_KEY)
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=arguments.gateway, headers=headers, timeout=_SECONDS)


def _local_ledger() -> str:
    """The ledger of the one `isobatch up` of this user, or of its gateway."""
    found = sorted(state_root(os.environ).glob("*/receipts.db"))
    if len(found) == 1:
        return str(found[0])
    several = ", ".join(str(path) for path in found) or "none"
    raise Failed(f"name the ledger with --ledger; found in {state_root(os.environ)}: {several}")


_VERBS = {"get": _get, "verify": _verify, "export": _export, "replay": _replay}
