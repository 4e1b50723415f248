"""A worker without a model: serves the paths that local mode probes, and misbehaves as told."""

import argparse
import json
import os
import signal
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from isobatch_cli.lifetime import honour_environment

CHILD = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool")
    parser.add_argument("--port", type=int)
    parser.add_argument("--served-model-name")
    parser.add_argument("--exit-code", type=int, help="end at once")
    parser.add_argument("--ready-when", type=Path, help="not ready before this file exists")
    parser.add_argument("--refuse", action="store_true", help="refuse certification")
    parser.add_argument("--ignore-sigterm", action="store_true")
    parser.add_argument("--fork", action="store_true", help="have a child in the same session")
    parser.add_argument("--fork-away", action="store_true", help="have a child in another session")
    parser.add_argument("--requests", type=int, default=0, help="in flight, for ever")
    parser.add_argument("--fingerprint", default="a")
    parser.add_argument("--note", help="nothing; makes another revision")
    # The rest is vLLM's: the default manifest passes some.
    return parser.parse_known_args()[0]


def numerics(options: argparse.Namespace) -> tuple[int, object]:
    if options.refuse:
        return 503, {"state": "refused", "reason": "no schedule of mm[576] keeps its bits"}
    if options.ready_when and not options.ready_when.exists():
        return 503, {"state": "certifying", "reason": "3 of 12 shapes"}
    return 200, {
        "state": "certified",
        "fingerprint": "sha256:" + options.fingerprint * 64,
        "modelDigest": "sha256:" + "d" * 64,
        "device": "fake",
        "versions": {},
        "operators": [],
        "fromCache": False,
        "certificationSeconds": 0.0,
    }


def answer(options: argparse.Namespace, path: str) -> tuple[int, object]:
    is_ready = not options.ready_when or options.ready_when.exists()
    match path:
        case "/isobatch/v1/numerics" if options.pool == "strict":
            return numerics(options)
        case "/health":
            return (200 if is_ready else 503), {}
        case "/v1/models" if is_ready:
            return 200, {"data": [{"id": options.served_model_name}]}
        case "/metrics":
            return 200, f'vllm:num_requests_running{{model="m"}} {options.requests}.0\n'
    return 404, {}


def main() -> None:
    honour_environment(os.environ)
    options = parse()
    print(f"fake {options.pool} worker, pid {os.getpid()}", flush=True)
    if options.exit_code is not None:
        print("something is wrong with the model", flush=True)
        sys.exit(options.exit_code)
    if options.ignore_sigterm:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fork or options.fork_away:
        subprocess.Popen([sys.executable, "-c", CHILD], start_new_session=options.fork_away)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answer(options, self.path)
            content = (body if isinstance(body, str) else json.dumps(body)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
