"""Decides nothing: the one way in which the cluster fails."""


class ClusterError(Exception):
    """A program of the cluster could not be built, started or ended; the message says why."""
