"""Tables of the constants that kernels are launched with, the fastest first, so that the backend's can be chosen.

What the backend has now comes first in every grid, and the rest is held against it.
Nothing is changed: the functions that choose are replaced while it runs. A choice that does not compile, or needs more
than a multiprocessor has, is counted and left out.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from foreword.cli.bench import number
from foreword.ops.triton import attention, matmul, planner
from foreword.ops.triton.kv_write import kv_format
from foreword.ops.triton.matmul import Tiles, multiply
from foreword.ops.triton.planner import make_plan

from .attention import Case, make_case
from .device import LEAST_COLD, Device
from .products import packed
from .sizes import Sizes

if TYPE_CHECKING:
    from .results import Report

Choice = dict[str, int]
_SHOWN = 12


def measure(device: Device, sizes: Sizes, report: Report, seconds: float) -> None:
    """All tables, each with an equal share of ``seconds``."""
    jobs = [*_attention_jobs(device, sizes), *_product_jobs(device, sizes)]
    for title, grid, current, run in jobs:
        _search(report, title, grid, current, run, seconds / len(jobs), limit=2 if device.rehearsal else None)


Grid = Mapping[str, Sequence[int]]
Job = tuple[str, Grid, str, Callable[[Choice], float]]
"""Title, choices, what the backend has now, and the seconds of a choice."""


def _attention_jobs(device: Device, sizes: Sizes) -> Iterator[Job]:
    decoding = make_case(device, sizes, sizes.batch, sizes.tokens, scattered=True)
    shared = make_case(device, sizes, sizes.batch, sizes.tail, shared=sizes.shared, scattered=True)
    few = make_case(device, sizes, 1, sizes.tokens, scattered=True)
    total = sizes.cached + sizes.new
    chunk = make_case(device, sizes, 1, total, query_len=sizes.new, scattered=True)
    wide = {"TILE": (64, 32, 128), "num_warps": (4, 8, 2), "num_stages": (3, 5, 4, 2)}
    high = wide | {"num_warps": (8, 4)}
    programs = {"programs a multiprocessor": (2, 1, 3, 4, 8)}
    decode_grid = {"height": (16, 32), **wide, **programs}
    for title, case, grid, exact in (
        ("decoding (G1)", decoding, decode_grid, False),
        ("one sequence decoding", few, decode_grid | {"least split": (256, 128, 512)}, False),
        ("behind a shared beginning (G2)", shared, {"height": (64, 128, 32), **wide, **programs}, False),
        ("a chunk (G3)", chunk, {"height": (128, 64), **high, "programs a multiprocessor": (2, 1)}, False),
        ("decoding, deterministic", decoding, {"height": (64, 32, 16), **high, "split": (1024, 512, 2048)}, True),
        ("a chunk, deterministic", chunk, {"height": (64, 128), **high, "split": (1024, 512, 2048)}, True),
    ):
        yield f"attention: {title}", grid, _current_attention(case, exact), _attention_run(device, case, exact)


def _current_attention(case: Case, exact: bool) -> str:
    heights = attention.tile_heights(case.query.dtype, case.query.shape[2], deterministic=exact)
    settings = dataclasses.replace(case.settings, heights=heights, deterministic=exact)
    plan = planner.draft_plan(case.sequences, settings)
    form = kv_format(case.layer, case.query.shape[2])
    options = attention.attention_options(
        case.query.dtype, form, case.query.shape[2], plan.tile_rows, split=plan.split, native_fp8=True
    )
    found = {"height": plan.tile_rows, **{key: options[key] for key in ("TILE", "num_warps", "num_stages", "SPLIT")}}
    return ", ".join(f"{key} {value}" for key, value in found.items()) + f", {len(plan.arrays[0])} items"


def _attention_run(device: Device, case: Case, exact: bool) -> Callable[[Choice], float]:
    def run(choice: Choice) -> float:
        per = choice.get("programs a multiprocessor", 2)
        settings = dataclasses.replace(
            case.settings, heights=(choice["height"],), programs=per * device.processors, deterministic=exact
        )
        options = {key: choice[key] for key in ("TILE", "num_warps", "num_stages")}
        original = attention.attention_options

        def replaced(*args: Any, **kwargs: Any) -> dict[str, Any]:
            return original(*args, **kwargs) | options

        with (
            mock.patch.object(attention, "attention_options", replaced),
            mock.patch.object(planner, "SPLIT", choice.get("split", planner.SPLIT)),
            mock.patch.object(planner, "_LEAST_SPLIT", choice.get("least split", planner._LEAST_SPLIT)),
        ):
            plan = make_plan(case.sequences, settings, device=device.name)
            return device.seconds(partial(attention.attend, case.query, case.layer, plan, case.spec), repeats=7).median

    return run


def _product_jobs(device: Device, sizes: Sizes) -> Iterator[Job]:
    few = {"rows": (16,), "columns": (128, 64, 256), "num_warps": (4, 2, 8), "num_stages": (5, 4, 3, 6)}
    few |= {"programs": (512, 256, 1024), "least split": (512, 256, 1024)}
    many = {"rows": (128, 64), "columns": (128, 64, 256), "num_warps": (8, 4), "num_stages": (3, 4, 2)}
    fixed = {"rows": (64, 32, 128), "columns": (64, 128), "num_warps": (8, 4), "num_stages": (4, 3, 5)}
    fixed |= {"programs": (512, 256, 1024)}
    products = sizes.shape.products()
    for form, (out, inputs), rows, grid in (
        ("int4", products[2], 1, few), ("int4", products[1], 1, few), ("int8", products[3], 1, few),
        ("int4", products[2], sizes.rows[-1], many), ("exact", products[2], 1, fixed),
        ("exact", products[2], sizes.rows[-1], {**fixed, "programs": (512,)}),
    ):  # fmt: skip
        tiles = matmul.choose_tiles(torch.bfloat16, 32, rows, deterministic=form == "exact")
        current = f"{tiles}, programs {matmul._PROGRAMS}, least split {matmul._LEAST_SPLIT}"
        yield (
            f"product: {form} {out} x {inputs}, {rows:,} rows", grid, current,
            _product_run(device, form, out, inputs, rows),
        )  # fmt: skip


def _product_run(device: Device, form: str, out: int, inputs: int, rows: int) -> Callable[[Choice], float]:
    @contextmanager
    def chosen(choice: Choice) -> Iterator[None]:
        tiles = Tiles(*(choice[name] for name in Tiles._fields))
        with (
            mock.patch.object(matmul, "choose_tiles", return_value=tiles),
            mock.patch.object(matmul, "_PROGRAMS", choice.get("programs", matmul._PROGRAMS)),
            mock.patch.object(matmul, "_LEAST_SPLIT", choice.get("least split", matmul._LEAST_SPLIT)),
        ):
            yield

    weights: list[Any] = []

    def run(choice: Choice) -> float:
        if not weights:  # made when the table's turn comes
            first, _ = packed(form, (torch.randn(out, inputs, device=device.name) * 0.02).bfloat16())
            count = 1 if device.rehearsal else -(-LEAST_COLD // first.values.nbytes)
            weights.extend(dataclasses.replace(first, values=first.values.clone()) for _ in range(count))
        x = torch.randn(rows, inputs, device=device.name).bfloat16()
        with chosen(choice):
            calls = [partial(multiply, x, each, deterministic=form == "exact") for each in weights]
            return device.seconds(*calls, repeats=7).median

    return run


def _search(
    report: Report,
    title: str,
    grid: Grid,
    current: str,
    run: Callable[[Choice], float],
    seconds: float,
    limit: int | None,
) -> None:
    """Try the choices, those that differ least from the first of all first, until the time is over."""
    ranks = sorted(itertools.product(*(range(len(values)) for values in grid.values())), key=sum)
    found: list[tuple[float, Choice]] = []
    failed, tried, end = 0, 0, time.monotonic() + seconds
    for rank in ranks[:limit]:
        if time.monotonic() > end:
            break
        tried += 1
        choice = {name: values[i] for (name, values), i in zip(grid.items(), rank, strict=True)}
        try:
            found.append((run(choice), choice))
        except Exception as error:  # what Triton raises for too much shared memory is not one type in all versions
            failed += 1
            if failed == 1:
                print(f"  {title}: {choice}: {type(error).__name__}: {str(error).splitlines()[0][:120]}", flush=True)
    first = {name: values[0] for name, values in grid.items()}
    now = next((taken for taken, choice in found if choice == first), math.nan)
    found.sort(key=lambda each: each[0])
    rows = [[*grid, "us", "now's time by it"]]
    for taken, choice in found[:_SHOWN]:
        rows.append([*(str(value) for value in choice.values()), number(taken * 1e6), f"{now / taken:.2f}"])
    report.tabulate(f"{title}; now {current}; {tried} of {len(ranks)} tried, {failed} failed", rows, 0)
