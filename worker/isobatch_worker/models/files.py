"""Decides which files of a model folder shape an answer: those that count in its digest."""

from collections.abc import Iterable
from fnmatch import fnmatchcase

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")
"""In the order in which vLLM looks: it loads the first kind that is there, and no other."""
_NOT_WEIGHTS = frozenset(
    {"training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt"}
)
"""What a training leaves behind; vLLM skips the same names."""
_TEXTS = (
    "*config.json",  # model, generation, tokenizer, quantization, processor
    "*.index.json",  # which shard holds which weight
    "params.json",
    "modules.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template*",
    "*.jinja",
    "*.py",  # code that --trust-remote-code runs
)
_IN_SUBFOLDERS = ("additional_chat_templates/*.jinja", "*_*/config.json", "*_*/*.safetensors")
"""The second and third are the modules of an embedding model, such as `1_Pooling`."""


def shaping_files(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` (relative, with /) that shape an answer, sorted.

    Of the weights only the kind counts that vLLM loads, so that a `pytorch_model.bin` that some
    other program put beside `model.safetensors` does not change the digest.
    """
    visible = [name for name in names if not any(p.startswith(".") for p in name.split("/"))]
    weights = weight_files(visible)
    texts = (name for name in visible if _is_text(name))
    return tuple(sorted({*weights, *texts}))


def weight_files(names: Iterable[str]) -> tuple[str, ...]:
    """Those of `names` that vLLM loads as weights: all of one kind, sorted."""
    candidates = [name for name in names if "/" not in name and name not in _NOT_WEIGHTS]
    for kind in _WEIGHTS:
        if found := sorted(name for name in candidates if fnmatchcase(name, kind)):
            return tuple(found)
    return ()


def may_hold_shaping_files(subfolder: str) -> bool:
    """Whether a direct subfolder of that name is worth a look; others may not even be readable."""
    heads = (pattern.partition("/")[0] for pattern in _IN_SUBFOLDERS)
    return any(fnmatchcase(subfolder, head) for head in heads)


def hub_patterns(names: Iterable[str]) -> list[str]:
    """Patterns that cover every shaping file of a hub repository with the files `names`.

    They are the same for any two downloads of one repository, whatever is already there.
    """
    weights = weight_files(names)
    kinds = [kind for kind in _WEIGHTS if weights and fnmatchcase(weights[0], kind)]
    return [*_TEXTS, *_IN_SUBFOLDERS, *kinds]


def _is_text(name: str) -> bool:
    if "/" not in name:
        return any(fnmatchcase(name, pattern) for pattern in _TEXTS)
    # fnmatch's * crosses a /: without this, a/b_c/config.json would count.
    return name.count("/") == 1 and any(fnmatchcase(name, pattern) for pattern in _IN_SUBFOLDERS)
