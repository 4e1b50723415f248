"""Our own HTTP/1.1 client: one connection, the pool that keeps them, and httpx on top."""
