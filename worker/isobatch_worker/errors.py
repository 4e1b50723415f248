"""The worker's errors.

WorkerError
+-- ModelUriError       a model URI that is malformed
+-- ModelUnavailable    a model that cannot be had here
+-- DigestMismatch      other weights than the ones asked for
+-- CacheUnusable       a cache folder that cannot be made or written to
+-- ShapeError          a text that names no operator shape
"""


class WorkerError(Exception):
    """Base: the message says what was wrong, what was expected and what to do."""


class ModelUriError(WorkerError, ValueError):
    """A model URI that is malformed."""


class ModelUnavailable(WorkerError):
    """A model that cannot be had here."""


class DigestMismatch(WorkerError):
    """Other weights than the ones asked for."""


class CacheUnusable(WorkerError):
    """A cache folder that cannot be made or written to."""


class ShapeError(WorkerError, ValueError):
    """A text that names no operator shape."""
