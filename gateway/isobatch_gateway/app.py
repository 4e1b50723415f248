"""Performs: puts the HTTP application together: our own JSON routes, and the proxied paths."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any, cast

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from isobatch_contracts import errors
from isobatch_contracts import headers as names
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from isobatch_gateway import asked as asking
from isobatch_gateway.openapi import PROXIED, describe
from isobatch_gateway.orders import Principal
from isobatch_gateway.proxy import BAD_KEY, Proxy, principal_of
from isobatch_gateway.receipts.routes import add_receipts
from isobatch_gateway.refusals import Refusal, Refused, error_body, error_headers
from isobatch_gateway.runtime import Runtime
from isobatch_gateway.views import Health, ModelList, ServiceList, models_view, services_view

_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_DESCRIPTION = """\
OpenAI's API in front of two pools: **strict**, whose bits do not depend on the batch, and
**throughput**, stock vLLM. A request declares its tier in the header `X-Consistency-Tier`, the body
field `consistency_tier` or the model's suffix (`name:strict`).
"""


class GatewayApp(FastAPI):
    """The application.

    Proxied paths are taken before FastAPI's stack: its layers cost a request 0.1-0.3 ms, and they
    have nothing to decide there.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.proxy = Proxy(runtime)
        super().__init__(
            title="isobatch gateway",
            description=_DESCRIPTION,
            version="v1",
            redirect_slashes=False,
            lifespan=_lifespan,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry."""
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PROXIED:
            await self.proxy(scope, receive, send)
        elif scope["type"] == "http":
            # The server leaves the body out of the answer to a HEAD; to us it is a GET.
            asked = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
            await super().__call__(asked, receive, _tagged(scope, send))
        else:
            await super().__call__(scope, receive, send)

    def openapi(self) -> dict[str, Any]:
        """FastAPI's document and the proxied paths."""
        if not self.openapi_schema:
            has_keys = self.runtime.keys is not None
            self.openapi_schema = describe(super().openapi(), has_keys=has_keys)
        return self.openapi_schema


def _tagged(scope: Scope, send: Send) -> Send:
    """`send` that echoes the request id, or gives a fresh one."""
    fresh = f"req-{random.getrandbits(128):032x}"  # unique, not secret
    tag = asking.request_id(asking.pick(scope["headers"]), fresh).encode()

    async def tagging(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], (names.REQUEST_ID.encode(), tag)]
        await send(message)

    return tagging


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with cast("GatewayApp", app).runtime.running():
        yield


def create_app(runtime: Runtime) -> GatewayApp:
    """The application over `runtime`."""
    app = GatewayApp(runtime)
    for path in PROXIED:
        # Never reached by POST; it gives other methods their 405.
        app.router.routes.append(Route(path, app.proxy, methods=["POST"]))
    _add_operations(app, runtime)
    known = _caller(runtime)
    _add_lists(app, runtime, known)
    add_receipts(app, runtime, known)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(Refused, _on_refused)
    app.add_exception_handler(RequestValidationError, _on_invalid)
    return app


def _add_operations(app: FastAPI, runtime: Runtime) -> None:
    @app.get("/healthz", tags=["operations"])
    async def healthz() -> Health:
        """Whether the process is alive."""
        return Health(status="ok")

    @app.get(
        "/readyz",
        tags=["operations"],
        responses={503: {"model": Health, "description": "No table yet, or shutting down."}},
    )
    async def readyz(response: Response) -> Health:
        """Whether requests should be sent here."""
        if runtime.is_ready:
            return Health(status="ready")
        response.status_code = 503
        return Health(status="draining" if runtime.is_draining else "no routing table")

    @app.get("/metrics", tags=["operations"], response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        now = asyncio.get_running_loop().time()
        text = runtime.metrics.text(runtime.fleet, runtime.source, now)
        return Response(text, media_type=_METRICS_TYPE)


def _caller(runtime: Runtime) -> Any:
    """Who asks, as a dependency of our own routes."""

    def caller(request: Request) -> Principal:
        principal = principal_of(runtime, request.headers.get("authorization"))
        if principal is None:
            raise Refused(BAD_KEY)
        return principal

    return Depends(caller)


def _add_lists(app: FastAPI, runtime: Runtime, known: Any) -> None:
    @app.get("/v1/models", tags=["models"])
    async def models(principal: Principal = known) -> ModelList:
        """The models that this key may use."""
        return models_view(runtime.fleet, principal)

    @app.get("/isobatch/v1/services", tags=["isobatch"])
    async def services(principal: Principal = known) -> ServiceList:
        """What is served: tiers, pools, revisions, fingerprints, readiness."""
        return services_view(runtime.fleet, principal)


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        kind = errors.METHOD_NOT_ALLOWED
        allowed = (error.headers or {}).get("Allow", "another method")
        message = f"{request.method} is not allowed here; use {allowed}."
    else:
        kind = errors.PATH_NOT_FOUND
        message = f"There is nothing at {request.url.path[:256]!r}; see /docs for what there is."
    body = error_body(Refusal(kind, message))
    return Response(
        body, kind.status, headers=dict(error.headers or {}), media_type="application/json"
    )


async def _on_invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    field = str(problem["loc"][-1])
    message = f"{field} is wrong: {problem['msg']}. See /docs for what is expected."
    body = error_body(Refusal(errors.invalid_request(field), message, param=field))
    return Response(body, 400, media_type="application/json")


async def _on_refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    body = error_body(error.refusal)
    headers = {name.decode(): value.decode() for name, value in error_headers(error.refusal, body)}
    return Response(body, error.refusal.kind.status, headers=headers)
