"""Decides which refusal a failure becomes: the rows of the API's error table."""

from isobatch_contracts import errors
from isobatch_contracts.tiers import Tier

from isobatch_gateway.errors import (
    DrainDeadline,
    FirstByteTimedOut,
    IdleTimedOut,
    Interrupted,
    LedgerUnavailable,
    ReplicaSilent,
    TotalTimedOut,
    UpstreamError,
)
from isobatch_gateway.limits import TooMany, WaitedTooLong
from isobatch_gateway.refusals import Refusal, is_error

_SOON = 1  # seconds: a replica that restarts is found again within about two
_DRAINING = 5


def unavailable(tier: Tier) -> Refusal:
    """No replica of the tier's pool is ready."""
    if tier.is_bitwise:
        return Refusal(
            errors.STRICT_UNAVAILABLE,
            f"No certified replica of the strict pool is ready, and {tier.value} is served by no "
            "other. Try again, or declare standard if drift is acceptable.",
            retry_after=_SOON,
        )
    return Refusal(
        errors.POOL_UNAVAILABLE,
        "No replica of the throughput pool is ready. Try again shortly.",
        retry_after=_SOON,
    )


def draining(tier: Tier | None) -> Refusal:
    """The gateway is stopping."""
    is_bitwise = tier is not None and tier.is_bitwise
    return Refusal(
        errors.STRICT_UNAVAILABLE if is_bitwise else errors.POOL_UNAVAILABLE,
        "This gateway is shutting down. Send the request again: another one will take it.",
        retry_after=_DRAINING,
        closes=True,
    )


def over_limit(tier: Tier, reason: TooMany | WaitedTooLong) -> Refusal:
    """An admission limit was reached."""
    match reason:
        case TooMany(limit=limit, retry_after=retry_after):
            return Refusal(
                errors.RATE_LIMIT_EXCEEDED,
                f"Over the limit {limit} of the tier {tier.value}. Wait {retry_after} s and try "
                "again, or ask for a higher limit.",
                retry_after=retry_after,
            )
        case WaitedTooLong(seconds=seconds):
            return Refusal(
                errors.STRICT_UNAVAILABLE if tier.is_bitwise else errors.POOL_UNAVAILABLE,
                f"The tier {tier.value} is full and no place came free within {seconds:g} s. "
                "Try again later.",
                retry_after=_SOON,
            )


def failed(tier: Tier, error: UpstreamError) -> Refusal:
    """The last replica that was tried failed before its first byte."""
    match error:
        case FirstByteTimedOut() | ReplicaSilent():
            return Refusal(
                errors.UPSTREAM_TIMEOUT,
                "The model did not begin to answer in time. Try again, ask for fewer tokens, or "
                "stream the answer.",
                retry_after=_SOON,
            )
        case _ if tier.is_bitwise:
            return Refusal(
                errors.STRICT_UNAVAILABLE,
                "The replica of the strict pool failed before it answered, and no other is ready. "
                "Try again.",
                retry_after=_SOON,
            )
        case _:
            return Refusal(
                errors.UPSTREAM_FAILED,
                "The replica failed before it answered, and no other is ready. Try again.",
                retry_after=_SOON,
            )


def unrecorded() -> Refusal:
    """A strict answer without a durable receipt is none."""
    return Refusal(
        errors.STRICT_UNAVAILABLE,
        "The receipt of this request could not be written, and strict answers are not given "
        "without one. Try again, or declare standard; the gateway's log says what is wrong.",
        retry_after=_SOON,
    )


def cut_off(error: UpstreamError | Interrupted | LedgerUnavailable) -> Refusal:
    """The answer had begun and will not be completed: the text of the stream's error frame."""
    match error:
        case LedgerUnavailable():
            return unrecorded()
        case DrainDeadline():
            return Refusal(
                errors.POOL_UNAVAILABLE,
                "The gateway is shutting down; the answer is incomplete. Send the request again.",
            )
        case TotalTimedOut() | IdleTimedOut():
            return Refusal(
                errors.UPSTREAM_TIMEOUT,
                "The answer took too long and is incomplete. Send the request again.",
            )
        case _:
            return Refusal(
                errors.UPSTREAM_FAILED,
                "The replica failed in the middle; the answer is incomplete. Send it again.",
            )


def too_late(tier: Tier | None, error: Interrupted) -> Refusal:
    """The request was ended from outside before its client had seen anything."""
    if isinstance(error, DrainDeadline):
        return draining(tier)
    return Refusal(
        errors.UPSTREAM_TIMEOUT,
        "The request took longer than the gateway allows. Ask for fewer tokens.",
        retry_after=_SOON,
    )


def put_in_shape(path: str, status: int, body: bytes) -> Refusal | None:
    """A replica's refusal in no shape of OpenAI's (a route it does not have), put into ours."""
    if is_error(body):
        return None
    if status in (404, 405, 501):
        return Refusal(
            errors.PATH_NOT_FOUND, f"The model does not serve {path}; see /v1/models for others."
        )
    return Refusal(
        errors.request_refused(status), f"The replica refused the request with status {status}."
    )
