"""The configurations are vLLM's own, made from arguments as a user gives them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from isobatch_worker.compose import STRICT_GRAMMARS
from isobatch_worker.engine_config import REFUSED, On, refusals, refused_on, refused_options
from vllm.config.compilation import CompilationMode
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.attention.backends.registry import AttentionBackendEnum

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
    """(arguments of vLLM) -> the resolved configuration of a tiny model, as composed for strict."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY))

    def from_arguments(*arguments: str, grammars: tuple[str, ...] = STRICT_GRAMMARS) -> Any:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        common = ["--model", str(model), "--skip-tokenizer-init", "--max-model-len", "128"]
        options = parser.parse_args([*common, "--dtype", "bfloat16", *grammars, *arguments])
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


def test_a_library_of_grammars_that_the_first_request_decides_is_refused(
    configure: Configure,
) -> None:
    (refused,) = refusals(configure("--enforce-eager", grammars=()), On.CPU)

    assert "--structured-outputs-config" in refused


OnCard = Callable[..., Any]


@pytest.fixture
def on_card(configure: Configure, monkeypatch: pytest.MonkeyPatch) -> OnCard:
    """(runner, "1" for V2) -> the configuration that vLLM resolves on a card."""

    def resolve(runner: str = "1") -> Any:
        config = configure()
        config.attention_config.backend = AttentionBackendEnum.CUSTOM
        config.parallel_config.worker_cls = "vllm.v1.worker.gpu_worker.Worker"
        config.compilation_config.mode = CompilationMode.VLLM_COMPILE
        # Only now: vLLM makes no configuration of the V2 runner where there is no card.
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
        return config

    return resolve


def test_the_defaults_of_a_card_are_certified(on_card: OnCard) -> None:
    assert refusals(on_card(), On.CUDA) == []


@pytest.mark.parametrize(
    ("part", "attribute", "value", "named"),
    [
        ("attention_config", "backend", AttentionBackendEnum.FLASH_ATTN, "attention backend"),
        ("attention_config", "backend", None, "attention backend"),
        ("attention_config", "backend_per_kind", {"a": "b"}, "attention backends by kind"),
        ("parallel_config", "worker_cls", "a.Worker", "worker class"),
        ("parallel_config", "enable_expert_parallel", True, "experts over ranks"),
        ("parallel_config", "decode_context_parallel_size", 2, "several ranks"),
        ("parallel_config", "enable_dbo", True, "micro-batches"),
        ("model_config", "dtype", torch.float32, "model dtype"),
        ("model_config", "quantization", "fp8", "quantization"),
        ("model_config", "max_logprobs", -1, "max logprobs"),
        ("cache_config", "cache_dtype", "fp8", "KV cache dtype"),
        ("compilation_config", "mode", CompilationMode.DYNAMO_TRACE_ONCE, "compilation mode"),
        (
            "compilation_config",
            "inductor_compile_config",
            {"max_autotune": True},
            "tuning by the compiler",
        ),
        (None, "lora_config", object(), "LoRA"),
        (None, "speculative_config", object(), "speculative decoding"),
        (None, "kv_transfer_config", object(), "KV transfer"),
    ],
)
def test_a_card_refuses_by_name(
    part: str | None, attribute: str, value: object, named: str, on_card: OnCard
) -> None:
    config = on_card()
    object.__setattr__(getattr(config, part) if part else config, attribute, value)

    assert [said.split(":")[0] for said in refusals(config, On.CUDA)] == [named]


def test_the_v1_runner_is_refused_on_a_card(on_card: OnCard) -> None:
    assert any(said.startswith("model runner") for said in refusals(on_card("0"), On.CUDA))


def test_every_refusal_has_one_name_and_every_option_one_reason() -> None:
    names = [refused.name for refused in REFUSED]
    assert len(names) == len(set(names))
    for device in (On.CPU, On.CUDA):
        options = [option for one in refused_on(device) for option in one.options]
        assert len(options) == len(set(options)) == len(refused_options(device))
