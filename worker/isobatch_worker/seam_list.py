"""Names every seam into vLLM: what is patched or relied upon, why, and the source that was read."""

from dataclasses import dataclass

VLLM_VERSION = "0.26.0"


@dataclass(frozen=True, slots=True)
class Seam:
    """A name in vLLM, the digest of its source at `VLLM_VERSION`, and why isobatch touches it."""

    name: str
    digest: str  # first 16 hex digits of the SHA-256 of its source
    why: str


ON_BOTH = (
    Seam(
        "vllm.v1.engine.output_processor:OutputProcessor.process_outputs",
        "23ef4fe6fdb9ac57",
        "patched: tokens and logprobs are kept for their digests before a client has them",
    ),
)
"""Seams that both kinds of worker have."""

ON_CPU = (
    *ON_BOTH,
    Seam(
        "vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
        "08ef4307a47079e0",
        "patched: keeps each linear's shape, and gives the library's linear to certify",
    ),
    Seam(
        "vllm.model_executor.layers.utils:cpu_unquantized_gemm",
        "f399bc57bd3ce882",
        "relied upon: every linear calls layer.cpu_linear(x, weight, bias)",
    ),
    Seam(
        "vllm.v1.worker.cpu_model_runner:CPUModelRunner.load_model",
        "270bdfc6670d8cba",
        "patched: certification runs once the weights are loaded",
    ),
    Seam(
        "vllm.v1.worker.cpu_worker:CPUWorker.compile_or_warm_up_model",
        "19e8ebe79751c936",
        "patched: the whole model is probed once the KV cache is there",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build",
        "9b5210ad737ac3b1",
        "patched where whole requests are not admitted: long ones are cut into their tokens",
    ),
    Seam(
        "vllm.v1.attention.backends.cpu_attn:_get_attn_isa",
        "1743d607f29cc53c",
        "relied upon: which attention kernel is certified",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner.execute_model",
        "3ffb37bfcf81ad86",
        "relied upon: the probe runs steps of its own and reads execute_model_state.logits",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._update_states",
        "d9996fd25155aca4",
        "patched: a request's generator is dropped, since its state is a history (and vLLM's CPU "
        "path fails on rewinding it after a partial prefill)",
    ),
    Seam(
        "vllm.v1.worker.gpu_model_runner:GPUModelRunner._sample",
        "5cb5c1da02cfdc68",
        "relied upon: calls runner.sampler in the order of the input batch",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.forward",
        "586fe802add4fd74",
        "relied upon: StrictSampler overrides the steps that it calls",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.sample",
        "34cbd3ac6a6b3757",
        "relied upon: calls topk_topp_sampler(logits, generators, top_k, top_p)",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.apply_logits_processors",
        "4b31813d0881e38a",
        "relied upon: all it does before the penalties is exact",
    ),
    Seam(
        "vllm.v1.sample.sampler:Sampler.apply_penalties",
        "60daa4b6c511c1cf",
        "relied upon: StrictSampler overrides it",
    ),
    Seam(
        "vllm.model_executor.layers.utils:apply_penalties",
        "520846747c63782c",
        "relied upon: the penalties that are certified",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:MinPLogitsProcessor.apply",
        "4c1744c96780024f",
        "patched: its softmax is certified, and reaches only the rows that ask for it",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:LogitBiasLogitsProcessor.apply",
        "963e9e7210559980",
        "relied upon: exact",
    ),
    Seam(
        "vllm.v1.sample.logits_processor.builtin:MinTokensLogitsProcessor.apply",
        "c3607f7360c08ba8",
        "relied upon: exact",
    ),
)

ON_CUDA = (
    *ON_BOTH,
    Seam(
        "vllm.model_executor.layers.utils:dispatch_unquantized_gemm",
        "45a8acccf97c8ea7",
        "patched where linears and embeddings import it: gives our linear",
    ),
    Seam(
        "vllm.model_executor.layers.linear:UnquantizedLinearMethod.apply",
        "a4b103119d9814b6",
        "relied upon: calls what dispatch_unquantized_gemm gives",
    ),
    Seam(
        "vllm.model_executor.layers.vocab_parallel_embedding:UnquantizedEmbeddingMethod.apply",
        "a4b103119d9814b6",
        "relied upon: as above, for the LM head",
    ),
    Seam(
        "vllm.model_executor.custom_op:CustomOp.__new__",
        "51c0f2816907bdca",
        "relied upon: builds the layers that are registered out of tree",
    ),
    Seam(
        "vllm.model_executor.layers.layernorm:RMSNorm",
        "a904117458d6cebd",
        "subclassed: its forward is our kernel",
    ),
    Seam(
        "vllm.model_executor.layers.activation:SiluAndMul",
        "521e3ce96ea5c5b1",
        "subclassed: its forward is our kernel",
    ),
    Seam(
        "vllm.model_executor.layers.rotary_embedding.base:RotaryEmbedding",
        "e9f91c22a5b253e9",
        "subclassed: its forward is our kernel; its table is used as it is",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionBackend",
        "406b547f3e8054e1",
        "subclassed: its cache layout is ours",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.__init__",
        "60003b165f651764",
        "relied upon: what an attention layer is told",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl.do_kv_cache_update",
        "ab4e8b0582a46058",
        "relied upon: copies keys and values, no arithmetic",
    ),
    Seam(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionMetadataBuilder.build",
        "e4a7012807e5e567",
        "relied upon: a step's lengths and blocks",
    ),
    Seam(
        "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.dispatch",
        "2c18aeec8fbef968",
        "relied upon: without captured graphs a step runs in none, as the reference does",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
        "b467e94b5efa0d4b",
        "patched: certification runs once the weights are loaded",
    ),
    Seam(
        "vllm.v1.worker.gpu_worker:Worker.compile_or_warm_up_model",
        "fe8f224b83cb5cdd",
        "patched: the whole model is probed once graphs are captured",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        "ebcc12adaaf4d693",
        "relied upon: the probe runs steps of its own and reads execute_model_state",
    ),
    Seam(
        "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample",
        "2a48846515eadaf8",
        "relied upon: what it does to the logits before the sampler is exact",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.sampler:Sampler",
        "ce4a84b9742bd4ff",
        "patched: filters and top logprobs are ours; the other steps are certified or exact",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.states:SamplingStates",
        "e8dfddbb2a3f1858",
        "relied upon: seeds, temperatures and filters are kept by request",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.penalties:PenaltiesState",
        "1d1f1c024101b8f0",
        "relied upon: counts tokens exactly, again after a preemption",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.logit_bias:LogitBiasState",
        "54d7fb7c1fbfebf5",
        "relied upon: exact",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.bad_words:BadWordsState",
        "bea8787e13ad2b39",
        "relied upon: exact",
    ),
    Seam(
        "vllm.v1.worker.gpu.structured_outputs:StructuredOutputsWorker",
        "dcf0827e6db28f0a",
        "relied upon: exact",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores",
        "dc1fc6713e3016db",
        "patched where the sampler and the prompt's logprobs import it: ties by token id",
    ),
    Seam(
        "vllm.v1.worker.gpu.sample.prompt_logprob:PromptLogprobsWorker",
        "8791bc06a3070ea3",
        "relied upon: cuts from the batch's widest what a request asked for",
    ),
    Seam(
        "vllm.v1.sample.ops.topk_topp_triton:apply_top_k_top_p_triton",
        "db8a8149f30a0965",
        "relied upon: the filter that is certified, whatever the number of rows",
    ),
)
