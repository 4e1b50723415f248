"""Decides the Hugging Face tokenizer of a GGUF with byte-level BPE.

The document is written out rather than saved by a tokenizer library, whose next release may order
or name a field otherwise: the model's digest would change with no change in the model.
"""

from typing import Any

from isobatch_worker.errors import UnsupportedModel
from isobatch_worker.models.gguf_config import SpecialIds
from isobatch_worker.models.gguf_metadata import REMEDY, Metadata

_CONTROL, _USER_DEFINED = 3, 4  # gguf.TokenType

_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,  # GPT-2's own expression
}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}
"""`tokenizer.ggml.pre` -> the same split. A wrong one gives other ids and no error, so an unknown
one is refused."""


def tokenizer_document(metadata: Metadata, ids: SpecialIds) -> dict[str, Any]:
    """tokenizer.json. Raises `UnsupportedModel`."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    types = metadata.integers("tokenizer.ggml.token_type")
    split = metadata.text("tokenizer.ggml.pre")
    if split not in _PRE_TOKENIZERS:
        raise UnsupportedModel(
            f"the GGUF has the pre-tokenizer {split!r}; expected {' or '.join(_PRE_TOKENIZERS)}: "
            f"{REMEDY}"
        )
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise UnsupportedModel(
            f"the GGUF has {len(tokens)} tokens, {len(set(tokens))} of them distinct, of "
            f"{len(types)} types; expected three equal numbers: {REMEDY}"
        )
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[split],
        "post_processor": _post_processor(metadata, tokens, ids),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": _merges(metadata),
        },
    }


def tokenizer_config_document(metadata: Metadata, ids: SpecialIds) -> dict[str, Any]:
    """tokenizer_config.json: the roles of tokens, and the chat template where there is one."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    roles = {
        "bos_token": ids.begin,
        "eos_token": ids.ends[0],
        "pad_token": ids.pad,
        "unk_token": ids.unknown,
    }
    document: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.integer("llama.context_length"),
        **{role: None if one is None else tokens[one] for role, one in roles.items()},
    }
    template = metadata.optional_text("tokenizer.chat_template")
    return document if template is None else {**document, "chat_template": template}


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Tokens that are found in a text before BPE sees it; special ones are left out of answers."""
    return [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]


def _merges(metadata: Metadata) -> list[list[str]]:
    merges = [merge.split(" ") for merge in metadata.texts("tokenizer.ggml.merges")]
    if wrong := [merge for merge in merges if len(merge) != 2]:
        raise UnsupportedModel(
            f"the GGUF has the merge {' '.join(wrong[0])!r}; expected two tokens: {REMEDY}"
        )
    return merges


def _post_processor(
    metadata: Metadata, tokens: list[str], ids: SpecialIds
) -> dict[str, Any] | None:
    """Puts the begin token before a text, if the model wants that."""
    if ids.begin is None or not metadata.flag("tokenizer.ggml.add_bos_token"):
        return None
    token = tokens[ids.begin]
    begin = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": side, "type_id": n}} for n, side in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [begin, first],
        "pair": [begin, first, {"SpecialToken": {"id": token, "type_id": 1}}, second],
        "special_tokens": {token: {"id": token, "ids": [ids.begin], "tokens": [token]}},
    }
