"""A real Kubernetes on one machine, for tests and for people: `python -m tests.cluster up`."""
