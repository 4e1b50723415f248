"""Performs the plan with objects of a Kubernetes cluster: what `isobatch operator` runs."""
