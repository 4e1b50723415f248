"""The worker: composes and starts vLLM, and holds its numerics in the strict pool."""
