"""Performs: JSON logs, one object a line on stderr. Prompt text and keys are never handed to it."""

import contextlib
import logging
import sys
from typing import BinaryIO, cast

import orjson
import structlog
from structlog.typing import EventDict

_LEVELS = logging.getLevelNamesMapping()
LEVEL_NAMES = ("debug", "info", "warning", "error", "off")


def configure(level: str) -> None:
    """Log from `level` on; `off` logs nothing: nothing of ours is critical."""
    threshold = _LEVELS["CRITICAL"] if level == "off" else _LEVELS[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(serializer=_dumps),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.BytesLoggerFactory(file=cast("BinaryIO", _Stderr())),
        cache_logger_on_first_use=True,
    )
    root = logging.getLogger()
    root.handlers = [_ToStructlog()]
    root.setLevel(max(threshold, logging.WARNING))
    # The server warns of every malformed request: any client could flood the log.
    logging.getLogger("uvicorn.error").setLevel(max(threshold, logging.ERROR))


def access_logger() -> structlog.typing.FilteringBoundLogger:
    """The logger of one line a request, bound once: a lazy one is put together at every call."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger().bind()
    return logger


class _Stderr:
    """Standard error, whoever holds it now; a log that cannot be written is no reason to fail."""

    def write(self, line: bytes) -> None:
        """Write `line` if it can be written."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.write(line)

    def flush(self) -> None:
        """Flush if it can be flushed."""
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.buffer.flush()


class _ToStructlog(logging.Handler):
    """Carries what libraries log by the standard module."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger(record.name).log(
            record.levelno, record.getMessage(), exc_info=record.exc_info
        )


def _dumps(event: EventDict, **_: object) -> bytes:
    return orjson.dumps(event, default=repr)
