import dataclasses
from itertools import pairwise

import pytest
from isobatch_contracts.tiers import PoolName
from isobatch_worker.compose import Settings, WrongUse, compose

STRICT = Settings(
    pool=PoolName.STRICT,
    model_path="/models/m",
    model_digest="sha256:" + "0" * 64,
    served_name="m",
    host="127.0.0.1",
    port=8000,
    vllm_args=(),
    is_cpu=True,
    cores=4,
    report_path="/run/numerics.json",
    cache_folder="/cache",
    digest_of_file={"/t.jinja": "sha256:5"}.get,
)
THROUGHPUT = dataclasses.replace(STRICT, pool=PoolName.THROUGHPUT)


def with_args(settings: Settings, *arguments: str) -> Settings:
    return dataclasses.replace(settings, vllm_args=arguments)


def test_throughput_is_stock_vllm() -> None:
    launch = compose(THROUGHPUT, {})

    assert "--middleware" not in launch.arguments
    assert not [name for name in launch.environment if name.startswith("ISOBATCH")]
    assert "VLLM_CPU_ATTN_SPLIT_KV" not in launch.environment


def test_strict_has_the_plugin_the_endpoint_and_no_key_split() -> None:
    launch = compose(STRICT, {})

    assert "isobatch_worker.endpoint.NumericsEndpoint" in launch.arguments
    assert launch.environment["ISOBATCH_POOL"] == "strict"
    assert launch.environment["VLLM_PLUGINS"] == "isobatch"
    assert launch.environment["VLLM_CPU_ATTN_SPLIT_KV"] == "0"


@pytest.mark.parametrize(
    ("given", "absent", "present"),
    [
        (("--max-num-seqs", "8"), ("--max-num-seqs", "32"), ("--dtype", "bfloat16")),
        (("--max-num-seqs=8",), ("--max-num-seqs", "32"), ("--dtype", "bfloat16")),
        (("--max_model_len", "64"), ("--max-model-len", "2048"), ("--max-num-seqs", "32")),
    ],
    ids=["apart", "with-equals", "underscores"],
)
def test_cpu_defaults_yield_to_arguments(
    given: tuple[str, ...], absent: tuple[str, str], present: tuple[str, str]
) -> None:
    arguments = compose(with_args(THROUGHPUT, *given), {}).arguments

    pairs = set(pairwise(arguments))
    assert absent not in pairs
    assert present in pairs
    assert arguments[-len(given) :] == given


@pytest.mark.parametrize("pool", [STRICT, THROUGHPUT], ids=["strict", "throughput"])
def test_batch_invariant_mode_is_refused_on_a_cpu(pool: Settings) -> None:
    with pytest.raises(WrongUse, match="unset it"):
        compose(pool, {"VLLM_BATCH_INVARIANT": "1"})


@pytest.mark.parametrize(
    "argument",
    [
        *("--quantization=fp8", "--enable-lora", "--speculative-config", "--no-enforce-eager"),
        *("--speculative_config.method=ngram", "-q=fp8", "-tp=2", "-O3", "-cc.mode=3"),
    ],
)
def test_strict_refuses_what_is_not_certified_by_name(argument: str) -> None:
    with pytest.raises(WrongUse, match="strict pool cannot start with --"):
        compose(with_args(STRICT, argument), {})
    assert argument in compose(with_args(THROUGHPUT, argument), {}).arguments


def test_what_isobatch_gives_cannot_be_given_twice() -> None:
    with pytest.raises(WrongUse, match="--port"):
        compose(with_args(THROUGHPUT, "--port", "1"), {})


def test_thread_binding_of_the_user_stays() -> None:
    assert (
        "OMP_NUM_THREADS" not in compose(STRICT, {"VLLM_CPU_OMP_THREADS_BIND": "0-3"}).environment
    )
    assert compose(STRICT, {}).environment["OMP_NUM_THREADS"] == "3"


def test_the_settings_of_a_strict_worker_know_its_defaults_and_files() -> None:
    def of(*arguments: str) -> str:
        return compose(with_args(STRICT, *arguments), {}).environment["ISOBATCH_SETTINGS"]

    assert of("--max-model-len", "2048") == of()
    assert of("--max-model-len", "1024") != of()
    assert of("--chat-template", "/t.jinja") != of("--chat-template", "/u.jinja")


def test_bytecode_is_kept_in_our_cache_unless_the_user_has_a_place_for_it() -> None:
    environment = {"PYTHONDONTWRITEBYTECODE": "1"}

    added = compose(THROUGHPUT, environment).environment
    assert added["PYTHONPYCACHEPREFIX"] == "/cache/bytecode"
    assert added["PYTHONDONTWRITEBYTECODE"] == ""
    own = compose(THROUGHPUT, {**environment, "PYTHONPYCACHEPREFIX": "/mine"}).environment
    assert not [name for name in own if name.startswith("PYTHON")]


def test_a_strict_worker_on_a_card_has_our_attention_and_no_graph_of_a_stock_one() -> None:
    launch = compose(dataclasses.replace(STRICT, is_cpu=False), {})

    assert ("--attention-backend", "CUSTOM") in set(pairwise(launch.arguments))
    assert "--enforce-eager" not in launch.arguments
    assert launch.environment["VLLM_CACHE_ROOT"] == "/cache/vllm-strict"
    assert launch.environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_eager_on_a_card_is_another_fingerprint_and_on_a_cpu_the_default() -> None:
    def of(settings: Settings, *arguments: str) -> str:
        return compose(with_args(settings, *arguments), {}).environment["ISOBATCH_SETTINGS"]

    card = dataclasses.replace(STRICT, is_cpu=False)
    assert of(card, "--enforce-eager") != of(card)
    assert of(STRICT, "--enforce-eager") == of(STRICT)


def test_one_library_of_grammars_serves_all_strict_requests() -> None:
    given = "--structured-outputs-config.backend=guidance"

    assert "--structured-outputs-config.backend" in compose(STRICT, {}).arguments
    assert "xgrammar" not in compose(with_args(STRICT, given), {}).arguments
    assert "xgrammar" not in compose(THROUGHPUT, {}).arguments
