import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from isobatch_worker.errors import DigestMismatch, ModelUnavailable, ModelUriError
from isobatch_worker.models import (
    Builtin,
    ClaimPath,
    HubRepo,
    LoadedModel,
    LocalFolder,
    Progress,
    folder_digest,
    parse_uri,
    resolve,
)
from isobatch_worker.models.gguf_folder import bfloat16_bits, undo_rope_order
from isobatch_worker.models.store import _builtin_source
from safetensors import safe_open
from transformers import AutoTokenizer

BUILTIN = "builtin://smollm2-135m"


@contextmanager
def silent(_what: str) -> Iterator[Progress]:
    yield lambda _done, _total: None


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def model(cache: Path) -> LoadedModel:
    return resolve(BUILTIN, cache_dir=cache, expected_digest=None, progress=silent)


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("builtin://smollm2-135m", Builtin("smollm2-135m")),
        ("file:///a/b", LocalFolder(Path("/a/b"))),
        ("hf://org/name", HubRepo("org/name", None)),
        ("hf://org/name@v1", HubRepo("org/name", "v1")),
        ("pvc://claim/a/b", ClaimPath("claim", "a/b")),
    ],
)
def test_a_uri_names_its_model(text: str, meant: object) -> None:
    assert parse_uri(text) == meant


@pytest.mark.parametrize(
    "text", ["", "smollm2", "/a/b", "file://a/b", "hf://name", "hf://a/b@", "pvc://c", "s3://a/b"]
)
def test_a_malformed_uri_is_refused_with_what_was_expected(text: str) -> None:
    with pytest.raises(ModelUriError, match="://"):
        parse_uri(text)


def test_the_built_in_model_has_the_weights_of_its_gguf(model: LoadedModel) -> None:
    reader = gguf.GGUFReader(_builtin_source("smollm2-135m"))
    tensors = {t.name: t for t in reader.tensors}

    def of_gguf(name: str) -> Any:
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type)

    with safe_open(str(model.path / "model.safetensors"), framework="pt") as weights:

        def kept(name: str) -> Any:
            return weights.get_tensor(name).view(dtype=torch.int16).numpy()

        down = bfloat16_bits(of_gguf("blk.3.ffn_down.weight")).view(np.int16)
        key = undo_rope_order(of_gguf("blk.3.attn_k.weight"), 3)
        assert np.array_equal(kept("model.layers.3.mlp.down_proj.weight"), down)
        assert np.array_equal(
            kept("model.layers.3.self_attn.k_proj.weight"), bfloat16_bits(key).view(np.int16)
        )
        assert not np.array_equal(key, of_gguf("blk.3.attn_k.weight"))


@pytest.mark.parametrize(
    "text", ["Hello, world!", "12345 + 678", "naïve 日本語 🙂", "  two\n\nlines\t"]
)
def test_the_tokenizer_round_trips(model: LoadedModel, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model.path)

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_digest_is_of_content_alone(model: LoadedModel, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model.path, copy)
    (copy / "README.md").write_text("other")
    os.utime(copy / "config.json", (1, 1))
    assert folder_digest(copy) == model.digest

    with (copy / "model.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_END)
        file.write(bytes([byte ^ 1]))
    assert folder_digest(copy) != model.digest


def test_a_damaged_conversion_is_made_again(model: LoadedModel, cache: Path) -> None:
    (model.path / "config.json").write_text("{}")

    again = resolve(BUILTIN, cache_dir=cache, expected_digest=model.digest, progress=silent)
    assert again.digest == model.digest


def test_other_weights_than_asked_for_are_refused(model: LoadedModel, cache: Path) -> None:
    wanted = "sha256:" + "0" * 64
    uri = f"file://{model.path}"

    with pytest.raises(DigestMismatch, match=wanted):
        resolve(uri, cache_dir=cache, expected_digest=wanted, progress=silent)
    assert (
        resolve(uri, cache_dir=cache, expected_digest=None, progress=silent).digest == model.digest
    )


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("file:///nowhere", "no model folder"),
        ("builtin://other", "smollm2-135m"),
        ("pvc://claim/path", "only a cluster"),
    ],
)
def test_a_model_that_cannot_be_had_says_what_to_do(cache: Path, uri: str, says: str) -> None:
    with pytest.raises(ModelUnavailable, match=says):
        resolve(uri, cache_dir=cache, expected_digest=None, progress=silent)


def test_the_hub_offline_is_a_clear_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    with pytest.raises(ModelUnavailable, match="HF_TOKEN"):
        resolve("hf://a/b", cache_dir=cache, expected_digest=None, progress=silent)
