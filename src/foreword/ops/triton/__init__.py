"""The NVIDIA backend: kernels in Triton behind :class:`foreword.ops.protocol.Ops`.

Triton is imported by the modules of this package and nowhere else; without it the rest of the engine works.

backend        the protocol's implementation
layers         a decoder's layers with fused kernels
graphs         decoding steps as CUDA graphs
step           what attention reads in a step besides keys and values
plan           which rows meet which KV, as arrays for the device; once per step
planner        drafts plans
shared_prefix  what of a batch's KV is shared, as a tree
attention      paged attention and the merge of partial results
kv_write       rotary embedding, and keys and values into the pool
copy           slots of a pool to others, or to another pool
streams        work beside the model, on streams of its own
norms          RMS norms, with residuals, and of heads
activation     gated activations
packing        weights as the kernels read them, from our own, AWQ's and GPTQ's layouts
matmul         products with them, and batch-invariant ones with plain weights
sampling       tokens from logits: the most likely ones, and drawn ones
selfcheck      whether the kernels compute on a device what they should
numeric        number formats and functions that kernels share
compiled       every kernel compiled ahead of time: registers, spills, shared memory; ``cases``: what is

No GPU has run these kernels yet: their results are tested under Triton's interpreter, their code by compiling it for
sm_80, sm_90 and sm_100.
"""
