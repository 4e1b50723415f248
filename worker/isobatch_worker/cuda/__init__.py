"""The strict worker on a CUDA card: our kernels in vLLM's place."""
