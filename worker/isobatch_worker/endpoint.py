"""Serves our own paths, and closes every other one until strict is certified.

An ASGI middleware for vLLM's `--middleware`: the class is instantiated with the app.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import parse_qs

from isobatch_contracts.errors import PATH_NOT_FOUND, STRICT_UNAVAILABLE, ErrorKind
from isobatch_contracts.numerics import NUMERICS_PATH, Certified
from isobatch_contracts.receipt import DIGESTS_PATH
from pydantic import BaseModel

from isobatch_worker.answers import KEPT, Answers
from isobatch_worker.report import Report, read_report, report_path

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_NOT_KEPT = "No request of this id has been answered here, or it was long ago."
_OPEN_PATHS = frozenset({"/metrics", "/version"})
"""Reachable uncertified: they say nothing of the model's answers."""


class _ErrorBody(BaseModel):
    message: str
    type: str
    param: None = None
    code: str


class _Refusal(BaseModel):
    error: _ErrorBody


class NumericsEndpoint:
    """The middleware. Once the report says certified it stays so: an engine certifies once."""

    def __init__(self, app: App, answers: Answers = KEPT) -> None:
        """Wrap `app`, vLLM's API server."""
        self._app = app
        self._answers = answers
        self._path = report_path()
        self._certified: Certified | None = None

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer, refuse or pass on one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        report = self._report()
        if scope["path"] == NUMERICS_PATH:
            await _answer(send, 200 if isinstance(report, Certified) else 503, report)
        elif scope["path"].startswith(DIGESTS_PATH) and isinstance(report, Certified):
            await self._tell_digests(scope, send)
        elif isinstance(report, Certified) or scope["path"] in _OPEN_PATHS:
            await self._app(scope, receive, send)
        else:
            await _answer(send, STRICT_UNAVAILABLE.status, _refusal(report.reason))

    async def _tell_digests(self, scope: Message, send: Send) -> None:
        query = parse_qs(scope.get("query_string", b"").decode("latin-1"))
        at = [int(n) for n in query.get("at", [""])[0].split(",") if n.isdecimal()]
        name = scope["path"].removeprefix(DIGESTS_PATH)
        found = self._answers.digests(name, at, with_ids="ids" in query)
        if found is None:
            await _answer(send, PATH_NOT_FOUND.status, _error(PATH_NOT_FOUND, _NOT_KEPT))
        else:
            await _answer(send, 200, found)

    def _report(self) -> Report:
        if self._certified is not None:
            return self._certified
        report = read_report(self._path)
        if isinstance(report, Certified):
            self._certified = report
        return report


def _refusal(reason: str) -> _Refusal:
    message = f"this strict worker is not certified and answers nothing: {reason}"
    return _error(STRICT_UNAVAILABLE, message)


def _error(kind: ErrorKind, message: str) -> _Refusal:
    return _Refusal(error=_ErrorBody(message=message, type=kind.type, code=kind.code))


async def _answer(send: Send, status: int, body: BaseModel) -> None:
    payload = body.model_dump_json(by_alias=True, exclude_none=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(payload))]
    if status == STRICT_UNAVAILABLE.status:
        headers.append((b"retry-after", b"5"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": payload})
