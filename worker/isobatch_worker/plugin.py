"""The entry point `vllm.general_plugins`: vLLM calls `register` in each of its processes."""

import os

POOL = "ISOBATCH_POOL"
"""Environment variable with the pool of this worker; set by `isobatch worker`."""


def register() -> None:
    """Patch vLLM in a strict worker; do nothing anywhere else. Idempotent.

    Nothing of ours is imported in a throughput worker, which stays stock.
    """
    if os.environ.get(POOL) != "strict":
        return
    # A stock worker must not load these.
    from isobatch_kernels.certification import CertificationRefused
    from vllm.platforms import current_platform

    from isobatch_worker import certificate, seams
    from isobatch_worker.answers import keep

    try:
        if current_platform.is_cuda():
            from isobatch_worker.cuda.prepare import install
        else:
            from isobatch_worker.prepare import install
        install()
        seams.watch_outputs(keep)
    except CertificationRefused as refusal:
        # Reported, not raised: the API server then answers 503 with the reason on every path.
        certificate.report_refusal(refusal)
