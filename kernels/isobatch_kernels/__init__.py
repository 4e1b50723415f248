"""Operators with a fixed reduction tree, and their certification. Knows neither vLLM nor HTTP."""
