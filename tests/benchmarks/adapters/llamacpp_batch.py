"""llama.cpp at its best: a batcher over the C API that shares beginnings and decodes all sequences together."""

from __future__ import annotations

from typing import Any, NamedTuple

import llama_cpp
import numpy

CELLS = 32_768
"""Positions in the KV cache, for all sequences together."""

WAVE_CELLS = 4_096
"""Cells that requests fill at a time; the rest wait. Every token's attention walks over all cells in use."""

BATCH_TOKENS = 2048
KEPT = 16
"""Sequences kept for later calls, least recently used out first. Their ids are 0 to ``KEPT - 1``, requests' follow."""
SEQUENCES = 128


class Item(NamedTuple):
    """One token to compute; ``sample`` asks for the token after it."""

    token: int
    position: int
    sequence: int
    sample: bool


class Adapter:
    """Variants name the weights: ``q4_0``, ``q4_1``, ``q8_0``."""

    packages = ("llama-cpp-python",)

    def __init__(self, variant: str, model: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx, options.n_batch, options.n_seq_max = CELLS, BATCH_TOKENS, SEQUENCES
        options.n_threads = options.n_threads_batch = threads
        options.kv_unified = True  # one pool of cells, which sequences may share
        options.flash_attn_type = 1
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError("llama.cpp made no context")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._kept: dict[int, list[int]] = {}  # tokens by sequence, least recently used first
        self.notes = (
            f"C API, {variant}: all sequences in one llama_batch, shared beginnings through llama_memory_seq_cp, "
            f"{KEPT} kept; n_ctx={CELLS}, unified KV, flash attention, {threads} threads"
        )

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        shared = min(_common(prompts), min(map(len, prompts)) - 1)
        own = max(map(len, prompts)) - shared + max_tokens
        wave = max(1, WAVE_CELLS // own)
        base, cached = self._compute_beginning(prompts[0][:shared], own * min(wave, len(prompts)))
        outputs: list[list[int]] = []
        for start in range(0, len(prompts), wave):
            outputs += self._complete(prompts[start : start + wave], base, shared, max_tokens)
        reused = [cached] + [shared] * (len(prompts) - 1)
        return [{"token_ids": ids, "cached_tokens": count} for ids, count in zip(outputs, reused, strict=True)]

    def reset(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, False)
        self._kept.clear()

    def _compute_beginning(self, tokens: list[int], room: int) -> tuple[int, int]:
        """A kept sequence that holds exactly ``tokens``, and how many of them were there before.

        Older sequences make way until ``room`` more cells are free beside the kept ones.
        """
        source = max(self._kept, key=lambda sequence: _common([self._kept[sequence], tokens]), default=None)
        cached = 0 if source is None else _common([self._kept[source], tokens])
        others = [sequence for sequence in self._kept if sequence != source or not cached]
        while others and not self._fits(len(tokens) + room):
            self._forget(others.pop(0))
        if source is not None and cached and (len(self._kept[source]) == cached or not self._fits(len(tokens) + room)):
            base = source  # it goes on itself
            llama_cpp.llama_memory_seq_rm(self._memory, base, cached, -1)
            del self._kept[base]
        else:
            base = next(sequence for sequence in range(KEPT) if sequence not in self._kept)
            if source is not None and cached:
                llama_cpp.llama_memory_seq_cp(self._memory, source, base, 0, cached)
                self._kept[source] = self._kept.pop(source)  # now among the recently used
        self._decode([Item(tokens[i], i, base, False) for i in range(cached, len(tokens))])
        self._kept[base] = list(tokens)
        return base, cached

    def _complete(self, prompts: list[list[int]], base: int, shared: int, max_tokens: int) -> list[list[int]]:
        """Compute what each prompt has of its own behind ``base``, then decode all together."""
        by_sequence = dict(enumerate(prompts, KEPT))
        for sequence in by_sequence:
            llama_cpp.llama_memory_seq_cp(self._memory, base, sequence, 0, shared)
        items = [
            Item(prompt[i], i, sequence, i == len(prompt) - 1)
            for sequence, prompt in by_sequence.items()
            for i in range(shared, len(prompt))
        ]
        last = self._decode(items)
        outputs = {sequence: [last[sequence]] for sequence in by_sequence}
        for step in range(max_tokens - 1):
            last = self._decode([Item(last[s], len(prompt) + step, s, True) for s, prompt in by_sequence.items()])
            for sequence, token in last.items():
                outputs[sequence].append(token)
        if len(prompts) == 1:  # a conversation may go on from here
            llama_cpp.llama_memory_seq_cp(self._memory, KEPT, base, shared, -1)
            self._kept[base] = prompts[0] + outputs[KEPT][:-1]
        for sequence in by_sequence:
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        return list(outputs.values())

    def _decode(self, items: list[Item]) -> dict[int, int]:
        """Run the model over ``items``; the most likely next token by sequence, where asked for."""
        batch = self._batch
        sampled: dict[int, int] = {}
        for start in range(0, len(items), BATCH_TOKENS):
            part = items[start : start + BATCH_TOKENS]
            batch.n_tokens = len(part)
            for i, item in enumerate(part):
                batch.token[i], batch.pos[i] = item.token, item.position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, item.sequence
                batch.logits[i] = item.sample
            status = llama_cpp.llama_decode(self._context, batch)
            if status:
                raise RuntimeError(f"llama_decode gave {status}")
            wanted = [item.sequence for item in part if item.sample]
            if wanted:
                logits = llama_cpp.llama_get_logits(self._context)
                rows = numpy.ctypeslib.as_array(logits, shape=(len(wanted), self._vocab_size))
                sampled.update(zip(wanted, rows.argmax(axis=1).tolist(), strict=True))
        return sampled

    def _fits(self, cells: int) -> bool:
        """Whether one more kept sequence and ``cells`` more cells find room. Shared cells count more than once."""
        return len(self._kept) < KEPT and sum(map(len, self._kept.values())) + cells <= CELLS

    def _forget(self, sequence: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, sequence, -1, -1)
        del self._kept[sequence]


def _common(lists: list[list[int]]) -> int:
    """How many leading tokens all lists have in common."""
    count = 0
    for tokens in zip(*lists, strict=False):
        if len(set(tokens)) > 1:
            break
        count += 1
    return count
