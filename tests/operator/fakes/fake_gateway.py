"""A gateway without clients: says which table it has read, and when it is told to drain."""

import argparse
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from isobatch_cli.lifetime import honour_environment


def drain(_number: int, _frame: object) -> None:
    print("draining", flush=True)
    sys.exit(0)


def main() -> None:
    honour_environment(os.environ)
    parser = argparse.ArgumentParser()
    parser.add_argument("--tables", type=Path)
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--secret", type=Path)
    options = parser.parse_args()
    assert len(bytes.fromhex(options.secret.read_text().strip())) == 32
    signal.signal(signal.SIGTERM, drain)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            [path] = options.tables.glob("*.json")
            table = json.loads(path.read_bytes())
            match self.path:
                case "/metrics":
                    body = f'isobatch_gateway_table_version{{service="x"}} {table["version"]}.0\n'
                case "/readyz":
                    body = "{}"
                case _:
                    body = json.dumps(table)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            pass

    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
