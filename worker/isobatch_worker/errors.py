"""The worker's errors.

WorkerError
+-- ModelUriError         a model URI that is malformed
+-- ModelUnavailable      a model that cannot be had here
|   +-- UnsupportedModel  a GGUF that the converter does not know how to convert
+-- DigestMismatch        other weights than the ones asked for
+-- CacheUnavailable      no folder to keep a converted model in
"""


class WorkerError(Exception):
    """Base: the message says what was wrong, what was expected and what to do."""


class ModelUriError(WorkerError, ValueError):
    """A model URI that is malformed."""


class ModelUnavailable(WorkerError):
    """A model that cannot be had here."""


class UnsupportedModel(ModelUnavailable):
    """A GGUF that the converter does not know how to convert."""


class DigestMismatch(WorkerError):
    """Other weights than the ones asked for."""

    def __init__(self, uri: str, expected: str, actual: str) -> None:
        super().__init__(
            f"{uri} has digest {actual}, but {expected} was asked for: the weights, config or "
            "tokenizer are others; correct the digest, or name the model that has it"
        )
        self.expected = expected
        self.actual = actual


class CacheUnavailable(WorkerError):
    """No folder to keep a converted model in."""
