"""Decides which failures the operator knows: tried again, or said and left to a person."""


class ClusterError(Exception):
    """Base of what can go wrong between the operator and the cluster."""


class Unreachable(ClusterError):
    """The API server did not answer, or not now: the same again may do."""


class Conflict(ClusterError):
    """Somebody changed the object since it was read: look again."""


class Refused(ClusterError):
    """The API server will not have it; the message is its own."""
