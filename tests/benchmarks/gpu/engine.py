"""The whole engine on models with random weights: decoding against the floor of memory (G4 to G6, G8), many requests
behind a shared beginning against transformers (G7), first tokens, and what exactness costs."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from foreword import Engine
from foreword.ops.triton import graphs

from .device import Device, matmul_flops, report_bandwidth
from .peers import Prompts, Transformers
from .results import Spread
from .shapes import Shape

if TYPE_CHECKING:
    from foreword import RequestOutput

    from .results import Report


class Work(NamedTuple):
    """Lengths in tokens.

    Attributes:
        alone: prompt of one sequence, and what it generates (G4, G6).
        batch: sequences, prompt of each, and what each generates (G5).
        long: prompt and what is generated, together the context of G8.
        requests: how many, their shared beginning, what each has behind it, and what it generates (G7).
        copied, square: see :class:`.sizes.Sizes`.
        memory: of the KV cache.
    """

    alone: tuple[int, int]
    batch: tuple[int, int, int]
    long: tuple[int, int]
    requests: tuple[int, int, int, int]
    copied: int
    square: int
    memory: str
    runs: int


FULL = Work((128, 257), (64, 1024, 65), (32640, 129), (64, 8192, 32, 128), 4 * 2**30, 8192, "16GiB", 3)
SMALL = Work((16, 4), (2, 16, 4), (40, 3), (3, 256, 8, 3), 2**20, 64, "2MiB", 1)
"""For rehearsals."""


class Captures:
    """Counts the graphs that engines capture, and the seconds that takes."""

    def __init__(self) -> None:
        self.count, self.seconds = 0, 0.0
        original = graphs._PaddedStep.capture

        def capture(step: Any, memory: Any) -> Any:
            begin = time.perf_counter()
            result = original(step, memory)
            self.count, self.seconds = self.count + 1, self.seconds + time.perf_counter() - begin
            return result

        graphs._PaddedStep.capture = capture  # type: ignore[assignment, method-assign]


class Bench:
    """Engines on one checkpoint, made when they are first asked for."""

    def __init__(self, device: Device, shape: Shape, directory: Path, work: Work) -> None:
        self.device, self.shape, self.directory, self.work = device, shape, directory, work
        self.captures = Captures()
        self._random = random.Random(0)
        self._engines: dict[tuple[tuple[str, Any], ...], Engine] = {}

    def engine(self, **options: Any) -> Engine:
        key = tuple(sorted(options.items()))
        if key not in self._engines:
            if self.device.rehearsal:
                options |= {"kernels": "triton", "dtype": "float32"}
            self._engines[key] = Engine(
                self.directory, device=self.device.name, kv_cache_memory=self.work.memory, **options
            )
        return self._engines[key]

    def close(self, **options: Any) -> None:
        """Give back what the engine with these options takes."""
        engine = self._engines.pop(tuple(sorted(options.items())), None)
        if engine is not None:
            engine.close()
        del engine
        gc.collect()
        if not self.device.rehearsal:
            torch.cuda.empty_cache()

    def close_all(self) -> None:
        for key in list(self._engines):
            self.close(**dict(key))

    def prompts(self, count: int, length: int, shared: int = 0) -> Prompts:
        """Random tokens that no other prompt has, behind ``shared`` in common."""
        words = range(min(self.shape.vocabulary, 100_000))
        beginning = self._random.choices(words, k=shared)
        return [beginning + self._random.choices(words, k=length) for _ in range(count)]

    def decode_step(self, engine: Engine, count: int, length: int, tokens: int) -> Spread:
        """Seconds of a step in which ``count`` sequences decode: their prompts are cached before, the first run warms
        up, and of each run the time behind everybody's first token counts."""
        times = []
        for _ in range(self.work.runs + 1):
            prompts = self.prompts(count, length)
            generate(engine, prompts, 1)
            usages = [output.usage for output in generate(engine, prompts, tokens)]
            first = max(usage.time_to_first_token_s or 0.0 for usage in usages)
            times.append((max(usage.total_time_s for usage in usages) - first) / (tokens - 1))
        return spread(times[1:])


def generate(engine: Engine, prompts: Prompts, tokens: int) -> list[RequestOutput]:
    """Greedy, exactly so many tokens.

    Raises:
        RuntimeError: a request failed.
    """
    outputs = engine.generate(prompts, max_tokens=tokens, temperature=0, ignore_eos=True)
    for output in outputs:
        if output.error is not None or len(output.outputs[0].token_ids) != tokens:
            raise RuntimeError(f"a request of {len(prompts[0])} tokens gave {len(output.outputs[0].token_ids)} of "
                               f"{tokens}: {output.error}")  # fmt: skip
    return outputs


def spread(times: list[float]) -> Spread:
    return Spread(statistics.median(times), min(times), max(times))


def measure_start(bench: Bench, report: Report) -> None:
    """A new engine to its first token, with what kernels have to be compiled; then a prompt cold and cached."""
    begin = time.perf_counter()
    engine = bench.engine()
    report.add("making the engine", time.perf_counter() - begin, "s")
    report.note(f"{engine.backend}; {engine.stats().blocks_total:,} KV blocks")
    cache = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    before = len(list(cache.iterdir())) if cache.is_dir() else 0
    prompt = bench.prompts(1, bench.work.alone[0])
    begin = time.perf_counter()
    generate(engine, prompt, 2)
    report.add(f"first request, 2 tokens, with {before} entries in Triton's cache", time.perf_counter() - begin, "s")
    length = bench.work.requests[1]
    generate(engine, bench.prompts(1, length), 1)  # compiles what a prompt needs
    cold: list[float] = []
    cached: list[float] = []
    for _ in range(bench.work.runs):
        prompt = bench.prompts(1, length)
        for times in (cold, cached):
            times.append(generate(engine, prompt, 1)[0].usage.time_to_first_token_s or 0.0)
    report.add(f"first token of {length:,}, cold", spread(cold).times(1e3), "ms")
    report.add(f"first token of {length:,}, cached", spread(cached).times(1e3), "ms")
    flops = matmul_flops(bench.device, bench.work.square).median
    matrices = bench.shape.layers * sum(out * inputs for out, inputs in bench.shape.products())
    share = spread(cold).under(2 * matrices * length / flops)
    report.add("its products, of torch's bf16 product", share, "of its rate")


def measure_decode(bench: Bench, report: Report) -> None:
    """G4, G5, G8."""
    engine, shape, work = bench.engine(), bench.shape, bench.work
    bandwidth = report_bandwidth(bench.device, work.copied, report)
    for name, goal, count, (length, tokens) in (
        ("batch 1", "G4", 1, work.alone),
        (f"batch {work.batch[0]} x {work.batch[1]:,}", "G5", work.batch[0], work.batch[1:]),
        (f"batch 1, context {sum(work.long) - 1:,}", "G8", 1, work.long),
    ):
        step = bench.decode_step(engine, count, length, tokens)
        floor = shape.step_bytes(count, length + tokens / 2) / bandwidth
        report.add(f"decoding step, {name}", step.times(1e3), "ms")
        if goal == "G8":
            report.add(f"{name}: step by its floor of {floor * 1e3:.3f} ms", step.times(1 / floor), "x", goal)
        else:
            report.add(f"{name}: floor of {floor * 1e3:.3f} ms by the step", step.under(floor), "x", goal)
    report.note(
        f"floors: {shape.read_bytes() / 1e9:.3f} GB of weights that a step reads, of "
        f"{shape.parameters * 2 / 1e9:.3f} GB, and {shape.kv_bytes_per_token:,} bytes of KV a token"
    )
    report.note(f"{bench.captures.count} graphs were captured, in {bench.captures.seconds:.2f} s")


def measure_int4(bench: Bench, report: Report) -> None:
    """G6."""
    length, tokens = bench.work.alone
    plain = bench.decode_step(bench.engine(), 1, length, tokens)
    small = bench.decode_step(bench.engine(quantization="int4"), 1, length, tokens)
    bench.close(quantization="int4")
    report.add("decoding step, batch 1, 4-bit weights", small.times(1e3), "ms")
    report.add("bf16's step by it", small.under(plain.median), "x", "G6")
    bound = bench.shape.read_bytes() / bench.shape.read_bytes("int4")
    report.note(f"4-bit weights are {bench.shape.read_bytes('int4') / 1e9:.3f} GB to read, the output projection in 8 "
                f"bits among them: the ratio cannot pass {bound:.2f} where reading is all")  # fmt: skip


def measure_exact(bench: Bench, report: Report) -> None:
    """``deterministic=True`` against the default."""
    cases = ((1, *bench.work.alone), bench.work.batch)
    exact = bench.engine(deterministic=True)
    for count, length, tokens in cases:
        plain = bench.decode_step(bench.engine(), count, length, tokens)
        step = bench.decode_step(exact, count, length, tokens)
        report.add(f"exact decoding step, batch {count}, by the default's", step.times(1 / plain.median))
    length = bench.work.requests[1]
    firsts = {}
    for name, engine in (("default", bench.engine()), ("exact", exact)):
        generate(engine, bench.prompts(1, length), 1)
        outputs = [generate(engine, bench.prompts(1, length), 1)[0] for _ in range(bench.work.runs)]
        firsts[name] = spread([output.usage.time_to_first_token_s or 0.0 for output in outputs])
    ratio = firsts["exact"].times(1 / firsts["default"].median)
    report.add(f"exact first token of {length:,}, by the default's", ratio)
    bench.close(deterministic=True)


def measure_shared(bench: Bench, report: Report) -> None:
    """G7: the same prompts, of the same lengths, and the same number of tokens out."""
    count, shared, own, tokens = bench.work.requests
    what, total = f"{count} requests, {shared:,} shared + {own}, {tokens} out", count * tokens
    engine = bench.engine()
    cold: list[float] = []
    cached: list[float] = []
    prompts, computed = bench.prompts(count, own, shared), 0
    outputs: Prompts = []
    generate(engine, prompts, tokens)  # compiles and captures
    for _ in range(bench.work.runs):
        prompts = bench.prompts(count, own, shared)
        engine.reset_prefix_cache()
        before = engine.stats()
        for times in (cold, cached):
            begin = time.perf_counter()
            outputs = [output.outputs[0].token_ids for output in generate(engine, prompts, tokens)]
            times.append(time.perf_counter() - begin)
            if times is cold:
                computed = engine.stats().tokens_prefilled - before.tokens_prefilled
    ours = spread(cold)
    report.add(f"{what}: ours, cold", ours.under(total), "tok/s")
    report.add("ours, all cached", spread(cached).under(total), "tok/s")
    report.note(f"ours computed {computed:,} of {count * (shared + own):,} prompt tokens, cold")
    bench.close_all()

    peer = Transformers(bench.directory, bench.device)
    failed: Exception | None = None
    warm = bench.prompts(count, own, shared)
    for name, goal, run, warming in (
        ("transformers' generate", "G7 generate", peer.generate, (bench.prompts(2, own), 4)),
        ("transformers' continuous batching", "G7 continuous", peer.generate_batch, (warm, tokens)),
    ):
        try:
            run(*warming)
            seconds, theirs = run(prompts, tokens)
            _compare(report, name, seconds, theirs, outputs)
            report.add(f"ours by {name}", seconds / ours.median, "x", goal)
        except Exception as error:  # the other is measured all the same
            report.note(f"FAILED: {name}: {error!r:.200}")
            failed = error
    report.note(f"generate ran {peer.batch} prompts at once")
    peer.close()
    if failed is not None:
        raise failed


def measure_profile(bench: Bench, report: Report) -> None:
    """Where the device's time goes while one sequence decodes, and many."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CPU if bench.device.rehearsal else ProfilerActivity.CUDA
    key = "self_cpu_time_total" if bench.device.rehearsal else "self_device_time_total"
    for count, length, tokens in ((1, *bench.work.alone), bench.work.batch):
        engine, prompts = bench.engine(), bench.prompts(count, length)
        for _ in range(2):
            generate(engine, prompts, tokens)
        with profile(activities=[kind]) as found:
            begin = time.perf_counter()
            generate(engine, prompts, tokens)
            seconds = time.perf_counter() - begin
        events = sorted(found.key_averages(), key=lambda event: -getattr(event, key))
        total = sum(getattr(event, key) for event in events) or 1
        rows = [["kernel", "calls", "us in all", "share"]]
        for event in events[:12]:
            rows.append([event.key[:70], str(event.count), f"{getattr(event, key):,.0f}",
                         f"{getattr(event, key) / total:.1%}"])  # fmt: skip
        report.tabulate(f"Device time, batch {count}, {tokens} tokens out, cached prompts", rows)
        report.add(f"time with the device busy, batch {count}", total / 1e6 / seconds, "of all")


def _compare(report: Report, name: str, seconds: float, theirs: Prompts, ours: Prompts) -> None:
    """How fast, and how much of what came out is ours: roundings part greedy outputs of random weights soon.

    Raises:
        AssertionError: another number of tokens.
    """
    wanted, found = sum(map(len, ours)), sum(map(len, theirs))
    assert found == wanted, f"{name}: {found} tokens came out, not {wanted}; the times cannot be compared"
    report.add(name, wanted / seconds, "tok/s")
    same = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    report.note(f"{name}: the first token is ours in {same} of {len(ours)}")
