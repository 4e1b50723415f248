import pytest
from isobatch_worker.request_settings import request_settings


def settings(
    *arguments: str, files: dict[str, str] | None = None, environment: dict[str, str] | None = None
) -> str:
    return request_settings(arguments, environment or {}, (files or {}).get)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-num-seqs", "4"),
        ("--max_num_batched_tokens=64",),
        ("--no-enable-prefix-caching",),
        ("--num-gpu-blocks-override", "12", "--api-key", "k"),
    ],
    ids=" ".join,
)
def test_what_is_proved_not_to_reach_the_bits_is_no_part(arguments: tuple[str, ...]) -> None:
    assert settings(*arguments) == settings()


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-model-len", "64"),
        ("--override-generation-config", '{"temperature": 0.5}'),
        ("--hf-overrides", '{"rope_theta": 1}'),
        ("--an-option-of-tomorrow",),
        ("--enforce-eager",),
        ("--lora-modules", "a", "b"),
    ],
    ids=" ".join,
)
def test_anything_else_is(arguments: tuple[str, ...]) -> None:
    assert settings(*arguments) != settings()


def test_order_and_spelling_are_no_part() -> None:
    first = settings("--max-model-len", "64", "--seed=-1")
    assert settings("--seed", "-1", "--max_model_len=64") == first
    assert settings("--seed", "1", "--max_model_len=64") != first


def test_a_file_counts_by_what_it_holds() -> None:
    here = settings("--chat-template", "/a/t.jinja", files={"/a/t.jinja": "sha256:1"})

    assert settings("--chat-template", "/b/t", files={"/b/t": "sha256:1"}) == here
    assert settings("--chat-template", "/a/t.jinja", files={"/a/t.jinja": "sha256:2"}) != here


@pytest.mark.parametrize(
    "name",
    [
        *("TORCHINDUCTOR_MAX_AUTOTUNE", "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE"),
        *("TRITON_F32_DEFAULT", "VLLM_FLOAT32_MATMUL_PRECISION", "ATEN_CPU_CAPABILITY"),
        "VLLM_A_VARIABLE_OF_TOMORROW",
    ],
)
def test_a_variable_that_chooses_arithmetic_is_part(name: str) -> None:
    assert settings(environment={name: "1"}) != settings()
    assert settings(environment={name: "1"}) != settings(environment={name: "0"})


@pytest.mark.parametrize(
    "name",
    [
        *("PATH", "HOME", "VLLM_HOST_IP", "VLLM_SERVICE_HOST", "VLLM_PORT_80_TCP", "VLLM_API_KEY"),
        *("TRITON_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "HF_TOKEN"),
    ],
)
def test_what_differs_between_replicas_without_reaching_a_bit_is_no_part(name: str) -> None:
    assert settings(environment={name: "x"}) == settings()
