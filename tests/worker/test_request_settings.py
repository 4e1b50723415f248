import pytest
from isobatch_worker.request_settings import request_settings


def settings(*arguments: str, files: dict[str, str] | None = None) -> str:
    return request_settings(arguments, (files or {}).get)


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
