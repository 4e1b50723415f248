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

    from isobatch_worker import prepare, seams

    try:
        seams.check()
    except CertificationRefused as refusal:
        # Reported, not raised: the API server then answers 503 with the reason on every path.
        prepare.report_refusal(refusal)
        return
    certification = prepare.Certification()
    seams.install(certification.prepare, certification.confirm)
