"""What two processes exchange, and nothing else. Pydantic only: no HTTP, no Kubernetes, no torch.

`tiers` names the tiers and pools, `resource` is the InferenceService, `routing_table` the document
between operator and gateways, `numerics` what a worker says of itself, `errors` the refusals of
the HTTP API, `headers` the header names.
"""
