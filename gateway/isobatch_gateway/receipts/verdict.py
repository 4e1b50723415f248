"""Decides what a replay showed: the same bits, other ones, or why neither can be said."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class Verdict(StrEnum):
    """What a replay showed."""

    REPRODUCED = "Reproduced"
    DIFFERS = "Differs"
    UNAVAILABLE = "Unavailable"  # nothing with this fingerprint is served
    NOT_REPLAYABLE = "NotReplayable"  # of this receipt nobody can tell


class Place(NamedTuple):
    """Where two answers part: the sequence, and the token in it, from 0."""

    sequence: int
    token: int


class Finding(NamedTuple):
    """A verdict with its reason, if it needs one, and where the first difference is, if known."""

    verdict: Verdict
    reason: str | None = None
    first: Place | None = None


def compare(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Finding:
    """`was` and `now`: the sequences of two answers, as `facts.answer_body` has them."""
    if len(was) != len(now):
        return Finding(Verdict.DIFFERS, f"{len(was)} sequences were answered, and {len(now)} now")
    for before, after in zip(was, now, strict=True):
        number = before["index"]
        if before["tokens"] != after["tokens"]:
            said = f"{before['tokens']} tokens, and {after['tokens']} now"
            return Finding(Verdict.DIFFERS, f"sequence {number} had {said}")
        for field, what in (("tokenIds", "token ids"), ("logprobs", "logprobs")):
            if before[field] != after[field]:
                return Finding(Verdict.DIFFERS, f"the {what} of sequence {number} differ")
    return Finding(Verdict.REPRODUCED)


def first_difference(was: Sequence[Sequence[int]], now: Sequence[Sequence[int]]) -> Place | None:
    """Where the token ids part; None where they do not, as far as both go."""
    for number, (before, after) in enumerate(zip(was, now, strict=False)):
        if list(before) == list(after):
            continue
        pairs = enumerate(zip(before, after, strict=False))
        shorter = min(len(before), len(after))
        return Place(number, next((at for at, (a, b) in pairs if a != b), shorter))
    return None


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What fixes bits and is not as it was: `facts.numerics_body` of a receipt and of a replica."""
    found = [
        f"{what}: {was.get(name)}, now {now.get(name)}"
        for name, what in (("modelDigest", "model"), ("device", "device"))
        if was.get(name) != now.get(name)
    ]
    before, after = was.get("versions") or {}, now.get("versions") or {}
    found += [
        f"{name}: {before.get(name, 'absent')}, now {after.get(name, 'absent')}"
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]
    return found or ["the schedules, trees or arguments that the fingerprint covers"]
