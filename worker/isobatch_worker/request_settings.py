"""Decides which of vLLM's arguments can reach an answer, and so belong to the fingerprint. Pure.

Conservative: an argument is part of the fingerprint unless it is named here. That equal answers
come of two fingerprints is another statement, made by running both.
"""

import hashlib
import json
from collections.abc import Callable

NEUTRAL = frozenset(
    {
        # how much is batched, cached and kept: what certification proves not to reach the bits
        *("--max-num-seqs", "--max-num-batched-tokens", "--enable-chunked-prefill"),
        *("--no-enable-chunked-prefill", "--enable-prefix-caching", "--no-enable-prefix-caching"),
        *("--kv-cache-memory-bytes", "--num-gpu-blocks-override", "--gpu-memory-utilization"),
        *("--async-scheduling", "--no-async-scheduling", "--scheduling-policy"),
        "--enforce-eager",
        # what is logged and measured
        *("--uvicorn-log-level", "--disable-log-stats", "--enable-log-requests"),
        *("--disable-uvicorn-access-log", "--otlp-traces-endpoint", "--disable-log-requests"),
        # who may call, and how
        *("--api-key", "--ssl-keyfile", "--ssl-certfile", "--root-path", "--allowed-origins"),
        # in the plan already
        "--dtype",
    }
)


def request_settings(
    arguments: tuple[str, ...], digest_of_file: Callable[[str], str | None]
) -> str:
    """`sha256:…` of the arguments that are not `NEUTRAL`, files by what they hold.

    `digest_of_file` gives the digest of the file that a value names, None if it names none.
    """
    kept = []
    for flag, value in sorted(_pairs(arguments)):
        if flag not in NEUTRAL:
            kept.append((flag, digest_of_file(value) or value))
    return "sha256:" + hashlib.sha256(json.dumps(kept).encode()).hexdigest()


def _pairs(arguments: tuple[str, ...]) -> list[tuple[str, str]]:
    """(flag, its values joined) of each argument; a flag without a value has ""."""
    pairs: list[tuple[str, str]] = []
    for argument in arguments:
        if argument.startswith("-") and not argument[1:2].isdigit():
            flag, _, value = argument.partition("=")
            pairs.append((flag.replace("_", "-"), value))
        elif pairs:
            flag, before = pairs[-1]
            pairs[-1] = (flag, f"{before} {argument}".strip())
        else:
            pairs.append(("", argument))
    return pairs
