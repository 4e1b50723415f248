"""Decides what `isobatch --help` says of each command, and what to install for one.

The lines stand here because the help must not import the components: torch takes seconds.
"""

import difflib
from collections.abc import Collection

SUMMARIES = {
    "up": "serve a model from both pools as processes of this machine",
    "status": "say what `up` runs and whether it is ready",
    "logs": "show the log of a pool, of the gateway or of `up` itself",
    "rollout": "show or steer how a new revision takes over",
    "down": "stop what `up` started",
    "worker": "run one vLLM worker of a pool (what a pod runs)",
    "drain": "wait until the worker beside us answers nobody (what a pod does before its end)",
    "gateway": "run the OpenAI-compatible gateway",
    "operator": "serve the InferenceServices of a Kubernetes cluster",
    "certify": "prove which schedules keep the strict pool's bits here, and keep the plan",
    "numerics": "say what a numerics fingerprint stands for",
    "key": "create, list and revoke API keys of the gateway",
    "receipt": "show, verify, export and replay receipts of what was answered",
}

EXAMPLE = """\
example:
  isobatch up                     two pools and a gateway, with a small built-in model
  isobatch up -f service.yaml     the service of your own manifest
  isobatch COMMAND --help         options and examples of one command"""

_EXTRAS = {
    "isobatch_worker": "worker",
    "isobatch_gateway": "gateway",
    "isobatch_operator": "operator",
}


def help_text(version: str, commands: Collection[str]) -> str:
    """The text of `isobatch --help`; known commands first, in the order people need them."""
    known = [name for name in SUMMARIES if name in commands]
    others = sorted(set(commands) - set(known))
    width = max((len(name) for name in commands), default=0)
    lines = [f"  {name:<{width}}  {SUMMARIES.get(name, '')}".rstrip() for name in known + others]
    return "\n".join(
        [
            f"isobatch {version}: one model, a strict and a throughput pool, one gateway",
            "",
            "usage: isobatch COMMAND [OPTIONS]",
            "       isobatch --version",
            "",
            "commands:",
            *lines,
            "",
            EXAMPLE,
            "",
        ]
    )


def unknown_command(name: str, commands: Collection[str]) -> str:
    """What to say of a command that does not exist, with the closest one that does."""
    close = difflib.get_close_matches(name, commands, n=1)
    hint = f"did you mean `isobatch {close[0]}`?" if close else "`isobatch --help` lists them."
    return f"isobatch: there is no command {name!r}; {hint}\n"


def missing_module(command: str, component: str, module: str) -> str:
    """What to say when `command` of package `component` cannot be imported for want of `module`."""
    if module.partition(".")[0].startswith("isobatch_"):
        return f"isobatch: this installation lacks {module}: install isobatch again\n"
    extra = _EXTRAS.get(component)
    install = f"pip install 'isobatch[{extra}]'" if extra else f"pip install {module}"
    note = " (or isobatch[worker-cpu] without a GPU)" if extra == "worker" else ""
    return f"isobatch: `{command}` needs {module}, which is not installed: {install}{note}\n"
