"""Performs the conversion of a llama GGUF to a Hugging Face folder with bfloat16 weights."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from isobatch_worker.errors import UnsupportedModel
from isobatch_worker.models.gguf_config import LlamaShape, SpecialIds, config_document
from isobatch_worker.models.gguf_metadata import REMEDY, Metadata
from isobatch_worker.models.gguf_tensors import (
    Target,
    bfloat16_bits,
    require_same_tensors,
    targets,
    undo_rope_order,
)
from isobatch_worker.models.gguf_tokenizer import tokenizer_config_document, tokenizer_document
from isobatch_worker.models.progress import Progress, silent

CONVERTER = "v2"
"""Part of the cache's key: raise it when the output changes."""


def convert(source: Path, folder: Path, progress: Progress = silent) -> None:
    """Write the model in `source` to the empty `folder`, the same bytes on every machine.

    `progress` counts bytes of weights. Raises `UnsupportedModel` for a file that is no GGUF, or one
    whose model would be served wrongly: another architecture, tokenizer or kind of RoPE.
    """
    metadata, tensors = _read(source)
    metadata.require_convertible()
    shape = LlamaShape.of(metadata, is_tied="output.weight" not in tensors)
    ids = SpecialIds.of(metadata)
    wanted = targets(shape)
    require_same_tensors(wanted, {name: _shape(tensor) for name, tensor in tensors.items()})
    documents = {
        "config.json": config_document(shape, ids),
        "generation_config.json": ids.document(),
        "tokenizer.json": tokenizer_document(metadata, ids),
        "tokenizer_config.json": tokenizer_config_document(metadata, ids),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1), "utf-8")
    _write_weights(wanted, tensors, folder / "model.safetensors", progress)


def _read(source: Path) -> tuple[Metadata, dict[str, Any]]:
    """The metadata and the tensors by name; the latter are mapped, not read."""
    try:
        reader = gguf.GGUFReader(source)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as exc:  # what the library raises, by the damage
        raise UnsupportedModel(
            f"{source} is no whole GGUF ({exc}); expected a file with the magic GGUF: copy or "
            f"install it again, or {REMEDY}"
        ) from exc
    return Metadata(values), {tensor.name: tensor for tensor in reader.tensors}


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in reversed(tensor.shape))  # a GGUF counts from the inside


def _write_weights(
    wanted: Mapping[str, Target], tensors: Mapping[str, Any], path: Path, progress: Progress
) -> None:
    """Write the safetensors file by hand, tensor by tensor: numpy has no bfloat16."""
    total = sum(target.size_bytes for target in wanted.values())
    done = 0
    with path.open("wb") as file:
        file.write(_header(wanted))
        progress(done, total)
        for name, target in wanted.items():
            file.write(memoryview(_bits(tensors[name], target)).cast("B"))
            done += target.size_bytes
            progress(done, total)


def _header(wanted: Mapping[str, Target]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for target in wanted.values():
        header[target.name] = {
            "dtype": "BF16",
            "shape": list(target.shape),
            "data_offsets": [offset, offset + target.size_bytes],
        }
        offset += target.size_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the weights are aligned when the file is mapped
    return struct.pack("<Q", len(text)) + text


def _bits(tensor: Any, target: Target) -> npt.NDArray[np.uint16]:
    try:
        w = gguf.dequantize(tensor.data, tensor.tensor_type)
    except NotImplementedError as exc:
        raise UnsupportedModel(
            f"{tensor.name} is quantized as {tensor.tensor_type.name}; expected a kind that the "
            f"gguf library dequantizes: {REMEDY}"
        ) from exc
    if target.rope_heads is not None:
        w = undo_rope_order(w, target.rope_heads)
    return bfloat16_bits(w)
