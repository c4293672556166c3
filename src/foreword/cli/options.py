"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from foreword.core.config import KERNELS, KV_CACHE_DTYPES

if TYPE_CHECKING:
    from foreword import Engine


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--model",
        default="smollm2-135m",
        help='a name from "foreword models", a checkpoint directory, a .gguf file, or a hub repository "org/name" '
        "(default: %(default)s)",
    )
    group.add_argument("--device", default="auto", help='"cpu", "cuda" or "cuda:1" (default: a GPU if there is one)')
    group.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"], help="default: %(default)s")
    group.add_argument(
        "--quantization", default="auto", choices=["auto", "none", "int8", "int4"], help="default: %(default)s"
    )
    group.add_argument("--kernels", default="auto", choices=KERNELS, help="default: %(default)s")
    group.add_argument("--num-threads", type=int, metavar="N", help="threads that compute (default: torch's)")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest sequence (default: the model's)")
    group.add_argument("--kv-cache-memory", metavar="SIZE", help='e.g. "512MiB" (default: a fifth of free memory)')
    group.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="default: %(default)s")


def add_sampling_options(parser: argparse.ArgumentParser, *, temperature: float | None, default: str) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=256, help="tokens to generate at most (default: %(default)s)")
    group.add_argument(
        "--temperature", type=float, default=temperature, help=f"0 takes the most likely token (default: {default})"
    )
    group.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling, in (0, 1] (default: %(default)s)")
    group.add_argument("--top-k", type=int, default=0, help="keep the k most likely tokens; 0 keeps all")
    group.add_argument("--seed", type=int, help="makes the answer reproducible")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")


def open_engine(options: argparse.Namespace) -> Engine:
    """The engine that the engine options describe."""
    from foreword import Engine

    return Engine(
        options.model,
        device=options.device,
        dtype=options.dtype,
        quantization=None if options.quantization == "none" else options.quantization,
        kernels=options.kernels,
        num_threads=options.num_threads,
        max_model_len=options.max_model_len,
        kv_cache_memory=options.kv_cache_memory,
        kv_cache_dtype=options.kv_cache_dtype,
    )


def sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling options as keyword arguments."""
    keys = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    return {key: getattr(options, key) for key in keys}
