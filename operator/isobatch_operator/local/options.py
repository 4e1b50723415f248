"""Decides what the command lines of `up`, `status`, `logs` and `down` mean."""

import argparse

from isobatch_operator.rollout import Verb

_UP = """\
examples:
  isobatch up                              the built-in model, both pools, port 8080
  isobatch up -f service.yaml --detach     your manifest; returns once everything is ready
  isobatch up --port 9000                  another port for the gateway

An edit of FILE is taken while it runs: a new revision takes over once it is ready.
exit codes: 0 ok, 1 it cannot be served (the reason is printed), 2 wrong use"""
_STATUS = """\
examples:
  isobatch status
  isobatch status -o json chat

exit codes: 0 ready, 1 not ready or not running, 2 wrong use"""
_LOGS = """\
examples:
  isobatch logs strict               what the workers of the strict pool wrote
  isobatch logs throughput -f        and what they write from now on
  isobatch logs strict --replica 1 chat
  isobatch logs gateway | isobatch logs up"""
_DOWN = """\
examples:
  isobatch down            drain: open requests finish, then everything ends
  isobatch down --now chat do not wait for them"""


_ROLLOUT = """\
examples:
  isobatch rollout status chat
  isobatch rollout pause chat      hold it where it is; `resume` goes on
  isobatch rollout promote chat    go to 100 percent now; failing gates still roll back
  isobatch rollout abort chat      back to the stable revision at once
  isobatch rollout retry chat      try a failed revision again

exit codes: 0 ok, 1 not running or the rollout failed, 2 wrong use"""


def up_parser() -> argparse.ArgumentParser:
    """`isobatch up`."""
    parser = _parser("up", "Serve an InferenceService as processes of this machine.", _UP)
    parser.add_argument("-f", "--file", metavar="FILE", help="manifest (YAML); default: built in")
    parser.add_argument("--detach", action="store_true", help="serve in the background")
    parser.add_argument("--host", default="127.0.0.1", help="the gateway's (default: %(default)s)")
    parser.add_argument(
        "--port", type=_port, default=8080, help="the gateway's (default: %(default)s)"
    )
    parser.add_argument(
        "--keys", metavar="FILE", help="API keys (isobatch key); without it everybody may ask"
    )
    return parser


def status_parser() -> argparse.ArgumentParser:
    """`isobatch status`."""
    parser = _parser("status", "Say what `isobatch up` runs and whether it is ready.", _STATUS)
    parser.add_argument(
        "-o", "--output", choices=("table", "json", "yaml"), default="table", help="format"
    )
    _add_name(parser)
    return parser


def logs_parser() -> argparse.ArgumentParser:
    """`isobatch logs`."""
    parser = _parser("logs", "Show what the processes of `isobatch up` wrote.", _LOGS)
    parser.add_argument("pool", choices=("strict", "throughput", "gateway", "up"))
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument("--replica", type=int, metavar="N", help="one replica of the pool: 0, 1, …")
    parser.add_argument("--tail", type=int, metavar="LINES", help="only the last lines")
    _add_name(parser)
    return parser


def down_parser() -> argparse.ArgumentParser:
    """`isobatch down`."""
    parser = _parser("down", "Stop what `isobatch up` started.", _DOWN)
    parser.add_argument("--now", action="store_true", help="do not wait for open requests")
    _add_name(parser)
    return parser


def rollout_parser() -> argparse.ArgumentParser:
    """`isobatch rollout`."""
    parser = _parser("rollout", "Show or steer the rollout of what `up` serves.", _ROLLOUT)
    parser.add_argument("verb", choices=("status", *(verb.value for verb in Verb)))
    parser.add_argument(
        "-o", "--output", choices=("table", "json", "yaml"), default="table", help="format"
    )
    _add_name(parser)
    return parser


def _parser(command: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=f"isobatch {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="metadata.name; needed only if there are several")


def _port(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= 65535:
        return int(text)
    raise argparse.ArgumentTypeError(f"a port is a number of 1 to 65535, not {text!r}")
