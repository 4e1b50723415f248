"""Performs the plan with processes of this machine: what `isobatch up` runs."""
