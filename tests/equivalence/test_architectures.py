"""Every supported architecture against transformers' own implementation, and against itself in other chunkings.

Each model is tiny and random, with its switches set so that they matter: windows shorter than the prompt, a rotary
scaling whose borders lie within the head, biases and norm weights that are not what they are initialised to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.harness import Bench, load
from support import DEVICE, compute_paths, kernels_under_test, soaking

PROMPT = 30 if DEVICE == "interpreter" else 270  # more than two attention tiles
DECODE = 6
TOLERANCE = 1e-4

SMALL = {
    "vocab_size": 199,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    options: dict[str, Any]


CASES = [
    Case("llama2", "Llama", {"num_key_value_heads": 6, "hidden_act": "silu"}),
    Case("llama-biased", "Llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    Case("llama3", "Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    Case("llama-linear", "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    Case("mistral", "Mistral", {"sliding_window": 50}),
    Case("mistral-full", "Mistral", {"sliding_window": None}),
    Case("qwen2", "Qwen2", {"tie_word_embeddings": True}),
    Case("qwen2-sliding", "Qwen2", {"use_sliding_window": True, "sliding_window": 37, "max_window_layers": 1}),
    Case("qwen3", "Qwen3", {"head_dim": 32}),
    Case("qwen3-biased", "Qwen3", {"head_dim": 16, "attention_bias": True}),
    Case(
        "gemma2",
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 140,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
        },
    ),
    Case(
        "gemma3",
        "Gemma3",
        {
            "head_dim": 32,
            "num_hidden_layers": 7,
            "sliding_window": 45,
            "query_pre_attn_scalar": 20,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 50_000.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5_000.0},
            },
        },
    ),
    Case("smollm2", "Llama", {"tie_word_embeddings": True, "rope_theta": 100_000.0, "num_hidden_layers": 5}),
    Case("smollm3", "SmolLM3", {"num_hidden_layers": 5, "no_rope_layer_interval": 2}),
    Case(
        "smollm3-sliding",
        "SmolLM3",
        {"num_hidden_layers": 4, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 33},
    ),
]
IDS = [case.name for case in CASES]
KERNELS = kernels_under_test()
BEST = KERNELS[:2]
"""The torch operations and the best native kernels; or Triton's."""
KV_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny operations on one thread: a busy neighbour makes two wait for each other, 50 times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Case], Path]:
    """Saves a case's model once; gives the directory."""
    made: dict[str, Path] = {}

    def make(case: Case) -> Path:
        if case.name not in made:
            made[case.name] = tmp_path_factory.mktemp(case.name)
            random_model(case).save_pretrained(made[case.name])
        return made[case.name]

    return make


def random_model(case: Case) -> Any:
    import transformers

    config_class = getattr(transformers, "Gemma3TextConfig" if case.model == "Gemma3" else case.model + "Config")
    config = config_class(**{**SMALL, **case.options})
    torch.manual_seed(len(case.name))
    model = getattr(transformers, case.model + "ForCausalLM")(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif name.endswith("bias"):
                parameter.copy_(0.3 * torch.randn_like(parameter))
            else:
                parameter.copy_(0.15 * torch.randn_like(parameter))
    return model.eval()


def _tokens() -> list[int]:
    return torch.randint(
        3, SMALL["vocab_size"], (PROMPT + DECODE,), generator=torch.Generator().manual_seed(5)
    ).tolist()


@pytest.mark.parametrize("case", CASES, ids=IDS)
@torch.inference_mode()
def test_logits_equal_those_of_transformers(case: Case, checkpoint: Callable[[Case], Path]) -> None:
    """In float32, on every kernel path."""
    import transformers

    directory = checkpoint(case)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = _tokens()
    expected = reference(torch.tensor([tokens])).logits[0]
    # A switch that does nothing here could be wrong unnoticed: the model must depend on far and near tokens.
    assert expected.std() > 0.1

    for kernels in KERNELS:
        bench = Bench(load(directory, torch.float32, kernels))
        found = bench.run(tokens, [PROMPT, *[1] * DECODE])
        assert found.dtype == torch.float32
        assert (found - expected).abs().max().item() <= TOLERANCE, kernels


def bench_of(directory: Path, path: dict[str, Any], num_blocks: int = 128) -> Bench:
    decoder = load(directory, getattr(torch, path["dtype"]), path["kernels"], path["quantization"], deterministic=True)
    return Bench(decoder, num_blocks, KV_DTYPES.get(path.get("kv_cache_dtype", "auto")))


def is_quick(path: str) -> bool:
    """Torch operations take quantised weights for plain ones; 8-bit KV knows nothing of architectures, and neither it
    nor the rest differs much between sets of native kernels."""
    if path.startswith("torch"):
        return path.endswith(("-float32", "-bfloat16"))
    return path.startswith(f"{BEST[-1]}-") or path.endswith(("-float32", "-int8"))


def is_quick_here(name: str) -> bool:
    """Each architecture with plain and with quantised weights, some with every storage of them and of the KV."""
    return re.search("-(float32|int8)$|^(llama3|gemma2|gemma3)-", name) is not None


BY_PATH = [
    pytest.param(case, *path.values, id=f"{case.name}-{path.id}", marks=path.marks)
    for case in CASES
    for path in soaking(compute_paths(BEST), is_quick)
]


@pytest.mark.parametrize(("case", "path"), soaking(BY_PATH, is_quick_here))
def test_bits_do_not_depend_on_chunks_or_layout(
    case: Case, path: dict[str, Any], checkpoint: Callable[[Case], Path]
) -> None:
    bench = bench_of(checkpoint(case), path)
    tokens = _tokens()
    whole = bench.run(tokens)
    assert torch.isfinite(whole).all()
    for chunks, scatter in (([128], None), ([1, 2, 3, 5, 7, 11, 90], 1), ([PROMPT, *[1] * DECODE], 2), ([129, 100], 3)):
        assert torch.equal(bench.run(tokens, chunks, scatter), whole), (chunks, scatter)


BATCHED = [
    pytest.param(name, *path.values, id=f"{name}-{path.id}", marks=path.marks)
    for name in ("llama3", "mistral", "qwen2-sliding", "gemma2", "gemma3", "smollm3-sliding")
    for path in soaking(compute_paths(KERNELS), is_quick)
]


@pytest.mark.parametrize(("name", "path"), soaking(BATCHED, is_quick_here))
def test_bits_do_not_depend_on_the_batch(name: str, path: dict[str, Any], checkpoint: Callable[[Case], Path]) -> None:
    bench = bench_of(checkpoint(CASES[IDS.index(name)]), path, num_blocks=256)
    prompts = [_tokens()[start : start + length] for start, length in ((0, 270), (3, 40), (9, 130), (20, 5), (1, 200))]
    alone = [bench.run(prompt, scatter=number) for number, prompt in enumerate(prompts)]

    # All at once, each at its own stage: one prefills while others decode or continue a chunk.
    chunks = ([64, 100, 100], [36], [125], [], [1, 190])  # then token by token
    sequences = [bench.sequence(len(prompt), scatter=7) for prompt in prompts]
    logits: list[list[torch.Tensor]] = [[] for _ in prompts]
    for step in range(12):
        parts = {}
        for number, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
            size = chunks[number][step] if step < len(chunks[number]) else 1
            if part := prompt[sequence.computed : sequence.computed + size]:
                parts[number] = (sequence, part)
        for number, result in zip(parts, bench.step(parts.values()) if parts else [], strict=True):
            logits[number].append(result)
    for number, expected in enumerate(alone):
        assert torch.equal(torch.cat(logits[number]), expected), number
