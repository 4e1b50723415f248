"""Performs the command `isobatch drain`: waits until the worker of this pod answers nobody."""

import argparse
import re
import time
import urllib.error
import urllib.request

_SETTLE_SECONDS = 3.0  # for gateways to hear that this replica is leaving
_BETWEEN_SECONDS = 0.25
_QUIET_LOOKS = 4  # in a row: a request may be on its way
_TIMEOUT_SECONDS = 5.0
_REQUESTS = re.compile(r"^vllm:num_requests_(?:running|waiting)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)


def requests_in(metrics: str) -> float:
    """Requests that the worker has, by its `/metrics`."""
    return sum(float(value) for value in _REQUESTS.findall(metrics))


def drain(argv: list[str]) -> int:
    """Return 0 once nobody is answered any more, or nobody is there to answer."""
    parser = argparse.ArgumentParser(
        prog="isobatch drain",
        description="Wait until the worker at a port has no requests; the pod's grace bounds it.",
        epilog="example:\n  isobatch drain 8000",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("port", type=int)
    url = f"http://127.0.0.1:{parser.parse_args(argv).port}/metrics"
    time.sleep(_SETTLE_SECONDS)
    quiet = 0
    while quiet < _QUIET_LOOKS:
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_SECONDS) as answer:  # http
                text = answer.read().decode(errors="replace")
        except TimeoutError:
            quiet = 0  # busy
        except (urllib.error.URLError, OSError):
            return 0
        else:
            quiet = 0 if requests_in(text) else quiet + 1
        time.sleep(_BETWEEN_SECONDS)
    return 0
