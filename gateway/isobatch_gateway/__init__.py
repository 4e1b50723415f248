"""The OpenAI-compatible gateway: tier, pool, revision, replica, and the stream between."""
