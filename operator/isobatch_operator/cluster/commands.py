"""Performs the command `isobatch operator`."""

import argparse
import asyncio
import dataclasses
import logging
import os
import socket
import sys

import structlog

from isobatch_operator.cluster.errors import ClusterError
from isobatch_operator.cluster.operator import serve
from isobatch_operator.cluster.settings import SettingsInvalid, read_settings

_EXAMPLE = """\
environment:
  ISOBATCH_WATCH_NAMESPACES  namespaces to serve, by commas (default: all)
  ISOBATCH_WORKER_IMAGE      image of workers whose service names none
  ISOBATCH_POD_PATCH         file that is merged into the template of each worker's pod
  ISOBATCH_GATEWAY_SERVICE   NAME.NAMESPACE of the gateways' Service
  POD_NAME, POD_NAMESPACE    who this is, and where the Lease lies

example:
  KUBECONFIG=~/.kube/config isobatch operator --host 127.0.0.1 --port 8081"""


def operator(argv: list[str]) -> int:
    """Run the operator until it is told to stop. 0: stopped as it should; 1: could not go on."""
    arguments = _parser().parse_args(argv)
    _configure_logs(arguments.log_level)
    try:
        settings = dataclasses.replace(
            read_settings(os.environ, socket.gethostname()),
            host=arguments.host,
            port=arguments.port,
        )
        asyncio.run(serve(settings))
    except (SettingsInvalid, ClusterError, OSError) as exc:
        print(f"isobatch operator: {exc}", file=sys.stderr)  # noqa: T201  # a command's own words
        return 1
    return 0


def _configure_logs(level: str) -> None:
    """JSON lines on stderr; kopf's own only where something is wrong."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(message)s")
    logging.getLogger("kopf").setLevel(logging.WARNING)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="isobatch operator",
        description="Serve the InferenceServices of a Kubernetes cluster.",
        epilog=_EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--host", default="0.0.0.0", help="address of /healthz and /metrics")  # noqa: S104  # a pod's
    add("--port", type=int, default=8081, help="port of /healthz and /metrics (default 8081)")
    levels = ("debug", "info", "warning", "error")
    add("--log-level", choices=levels, default="info", help="default %(default)s")
    return parser
