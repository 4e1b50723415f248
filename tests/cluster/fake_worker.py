"""A worker without a model, for pods: vLLM's surface in the standard library, and faults as told.

It takes the arguments of `isobatch worker`; what follows `--` tells it how to misbehave. After
`--real` it is no fake any more: it becomes the real worker, so that one release has both.
"""

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pool")
    parser.add_argument("--model")
    parser.add_argument("--digest")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("behaviour", nargs="*")
    options = parser.parse_args()
    rest = argparse.ArgumentParser()
    rest.add_argument("--crash", action="store_true", help="end at once")
    rest.add_argument("--never-ready", action="store_true")
    rest.add_argument("--fail", action="store_true", help="answer 500")
    rest.add_argument("--delay", type=float, default=0.0, help="seconds before the first byte")
    rest.add_argument("--fingerprint", default="a")
    rest.add_argument("--note", help="nothing; makes another revision")
    return rest.parse_args(options.behaviour, namespace=options)


class Load:
    """Requests under way."""

    def __init__(self) -> None:
        self.running = 0
        self._lock = threading.Lock()

    def add(self, by: int) -> None:
        with self._lock:
            self.running += by


class Handler(BaseHTTPRequestHandler):
    server: "Server"
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        status: int = 503 if self.server.options.never_ready else 200
        match self.path:
            case "/health":
                self._send(status, {})
            case "/v1/models":
                self._send(status, {"data": [{"id": self.server.options.served_model_name}]})
            case "/metrics":
                self._send(
                    200, f'vllm:num_requests_running{{engine="0"}} {self.server.load.running}.0\n'
                )
            case "/isobatch/v1/numerics" if self.server.options.pool == "strict":
                self._send(status, self._numerics())
            case _:
                self._send(404, {})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.load.add(1)
        try:
            self.server.ended.wait(self.server.options.delay)
            if self.server.options.fail:
                self._send(500, {"error": {"message": "told to fail", "type": "x", "code": 5}})
            elif asked.get("stream"):
                self._stream(int(asked.get("max_tokens", 4)))
            else:
                self._send(200, self._chunk("text"))
        finally:
            self.server.load.add(-1)

    def _stream(self, tokens: int) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(tokens):
            self._event(json.dumps(self._chunk("t")))
            self.server.ended.wait(0.02)
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, text: str) -> None:
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _chunk(self, text: str) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
        return {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": self.server.options.served_model_name,
            "choices": [choice],
        }

    def _numerics(self) -> dict[str, Any]:
        if self.server.options.never_ready:
            return {"state": "certifying", "reason": "3 of 12 shapes"}
        return {
            "state": "certified",
            "fingerprint": "sha256:" + self.server.options.fingerprint * 64,
            "modelDigest": "sha256:" + "d" * 64,
            "device": "fake",
            "versions": {},
            "operators": [],
            "fromCache": False,
            "certificationSeconds": 0.0,
        }

    def _send(self, status: int, body: object) -> None:
        content = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.load = Load()
        self.ended = threading.Event()  # never set: to wait on
        super().__init__((options.host, options.port), Handler)


def main() -> None:
    if "--real" in sys.argv:
        program = str(Path(sys.prefix) / "bin/isobatch")
        rest = [word for word in sys.argv[1:] if word != "--real"]
        os.execv(program, [program, "worker", *rest])
    options = parse()
    if options.crash:
        sys.exit("told to crash")
    server = Server(options)

    def stop(*_: object) -> None:
        def drain() -> None:
            while server.load.running:
                time.sleep(0.02)
            server.shutdown()

        threading.Thread(target=drain).start()

    signal.signal(signal.SIGTERM, stop)
    server.serve_forever()


if __name__ == "__main__":
    main()
