"""Decides whether a GGUF's metadata has what the conversion needs, in the types that it needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from isobatch_worker.errors import UnsupportedModel

REMEDY = "give a Hugging Face folder of the model instead, as file:///path"

_HARMLESS: Mapping[str, tuple[object, ...]] = {
    "general.architecture": ("llama",),
    "tokenizer.ggml.model": ("gpt2",),
    "tokenizer.ggml.add_eos_token": (None, False),
    "llama.expert_count": (None, 0),
    "llama.rope.scaling.type": (None, "none"),
    "llama.attention.clamp_kqv": (None,),
    "llama.attention.sliding_window": (None, 0),
}
"""Key -> values that the converted model would honour. None stands for an absent key."""


@dataclass(frozen=True, slots=True)
class Metadata:
    """A GGUF's key-value pairs; each reader raises `UnsupportedModel` for what is not as asked."""

    values: Mapping[str, Any]

    def require_convertible(self) -> None:
        """Refuse a model that would be served wrongly: one with a property that we would drop."""
        for key, harmless in _HARMLESS.items():
            if self.values.get(key) not in harmless:
                wanted = " or ".join("absent" if v is None else repr(v) for v in harmless)
                self._refuse(key, wanted)

    def integer(self, key: str) -> int:
        """A whole number, not negative."""
        value = self.values.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            self._refuse(key, "a whole number")
        return value

    def optional_integer(self, key: str) -> int | None:
        """A whole number, not negative, or None for an absent key."""
        return self.integer(key) if key in self.values else None

    def number(self, key: str, default: float | None = None) -> float:
        """A finite float above zero."""
        value = self.values.get(key, default)
        if not isinstance(value, float) or not 0 < value < float("inf"):
            self._refuse(key, "a number above zero")
        return value

    def text(self, key: str) -> str:
        """A string."""
        value = self.values.get(key)
        if not isinstance(value, str):
            self._refuse(key, "a string")
        return value

    def optional_text(self, key: str) -> str | None:
        """A string, or None for an absent key."""
        return self.text(key) if key in self.values else None

    def flag(self, key: str) -> bool:
        """A boolean; an absent one is False."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            self._refuse(key, "true or false")
        return value

    def texts(self, key: str) -> list[str]:
        """A list of strings."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            self._refuse(key, "a list of strings")
        return value

    def integers(self, key: str) -> list[int]:
        """A list of whole numbers."""
        value = self.values.get(key)
        if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
            self._refuse(key, "a list of whole numbers")
        return value

    def _refuse(self, key: str, expected: str) -> NoReturn:
        shown = repr(self.values[key])[:60] if key in self.values else "no value"
        raise UnsupportedModel(f"the GGUF has {shown} for {key}; expected {expected}: {REMEDY}")
