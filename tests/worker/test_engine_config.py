"""The configurations are vLLM's own, made from arguments as a user gives them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from isobatch_worker.engine_config import On, refusals
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}

Configure = Callable[..., Any]


@pytest.fixture
def configure(tmp_path: Path) -> Configure:
    """(arguments of vLLM) -> the resolved configuration of a tiny model."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))

    def from_arguments(*arguments: str) -> Any:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        common = ["--model", str(model), "--skip-tokenizer-init", "--max-model-len", "128"]
        options = parser.parse_args([*common, "--dtype", "bfloat16", *arguments])
        return EngineArgs.from_cli_args(options).create_engine_config()

    return from_arguments


def test_the_defaults_of_a_cpu_are_certified(configure: Configure) -> None:
    assert refusals(configure("--enforce-eager"), On.CPU) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("-O1", "--no-enforce-eager"), "compilation"),
        (("-tp", "2"), "several ranks"),
        (("-dp=2",), "several ranks"),
        (("--logprobs_mode", "processed_logprobs"), "logprobs mode"),
        (("--logits-processors", "a.b:C"), "logits processors"),
        (("--enable-lora",), "LoRA"),
        (("--worker-extension-cls", "a.B"), "worker extension"),
        (
            ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 2}'),
            "speculative",
        ),
        (("--kv-cache-dtype", "fp8_e5m2"), "KV cache dtype"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else value,
)
def test_whatever_the_spelling_what_is_not_certified_is_refused(
    configure: Configure, arguments: tuple[str, ...], named: str
) -> None:
    eager = () if "--no-enforce-eager" in arguments else ("--enforce-eager",)

    assert any(said.startswith(named) for said in refusals(configure(*eager, *arguments), On.CPU))


def test_a_file_of_arguments_is_no_way_around(configure: Configure, tmp_path: Path) -> None:
    config = tmp_path / "vllm.yaml"
    config.write_text("tensor-parallel-size: 2\n")

    assert refusals(configure("--enforce-eager", "--config", str(config)), On.CPU)
