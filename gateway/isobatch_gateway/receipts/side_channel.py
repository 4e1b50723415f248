"""Performs: asks a strict worker for the digests of an answer, beside the answer itself."""

from collections.abc import Sequence

from isobatch_contracts.receipt import DIGESTS_PATH, AnswerDigests
from pydantic import ValidationError

from isobatch_gateway.errors import ConnectionDied, UpstreamError
from isobatch_gateway.upstream.connection import RawHeaders
from isobatch_gateway.upstream.control import Answer, ask
from isobatch_gateway.upstream.message import request_bytes
from isobatch_gateway.upstream.pool import ConnectionPool

_SECONDS = 10.0  # a worker in the middle of a long step answers when it is over


async def digests_of(
    pool: ConnectionPool,
    worker_id: str,
    *,
    at: Sequence[int] = (),
    with_ids: bool = False,
) -> AnswerDigests | str:
    """What the worker says of request `worker_id`, or why nothing is known.

    `at`: of each sequence only so many tokens, by its index.
    """
    query = [f"at={','.join(map(str, at))}"] if at else []
    query += ["ids=1"] if with_ids else []
    target = f"{DIGESTS_PATH}{worker_id}" + ("?" + "&".join(query) if query else "")
    try:
        answer = await ask_replica(pool, ("GET", target), [], b"", _SECONDS)
    except UpstreamError:
        return "the worker did not answer"
    if answer.status == 404:
        return "the worker knows nothing of the request"
    try:
        return AnswerDigests.model_validate_json(answer.body)
    except ValidationError:
        return "the worker keeps no digests"


async def ask_replica(
    pool: ConnectionPool,
    line: tuple[str, str],
    headers: RawHeaders,
    body: bytes,
    seconds: float,
) -> Answer:
    """The whole answer to the request that `line` (method, target) begins.

    Raises `UpstreamError`.
    """
    request = request_bytes(*line, pool.authority, headers, body)
    kept = pool.idle()
    if kept is not None:
        try:
            return await ask(kept, request, seconds)
        except ConnectionDied:
            if kept.has_answered:
                raise
            # The worker had closed a kept connection: the request never reached it.
    return await ask(await pool.connect(), request, seconds)
