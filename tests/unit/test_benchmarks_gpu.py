"""The benchmark for GPUs, as far as it needs none: floors, tables, and what it says where there is no GPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import __main__ as command
from benchmarks.gpu.results import GOALS, Report, Spread, write_section
from benchmarks.gpu.shapes import SHAPES
from foreword.model.config import ModelConfig
from foreword.model.size import weight_bytes


@pytest.mark.parametrize(
    ("name", "parameters", "kv"),
    [("8b", 8_030_261_248, 131_072), ("1.5b", 1_543_714_304, 28_672), ("135m", 134_515_008, 23_040)],
)
def test_shapes_are_those_of_the_models(name: str, parameters: int, kv: int) -> None:
    """The numbers that the models' cards tell."""
    assert SHAPES[name].parameters == parameters
    assert SHAPES[name].kv_bytes_per_token == kv


def test_floors_count_what_a_step_reads() -> None:
    """Of 8B, 16.06 GB in 16 bits: all but the embedding, which is not the output projection, and but the norms."""
    shape = SHAPES["8b"]
    embedding, norms = 128_256 * 4096, 65 * 4096
    assert shape.read_bytes() == 2 * (shape.parameters - embedding - norms) == 15_009_316_864
    assert shape.read_bytes("int4") == (shape.parameters - 2 * embedding - norms) * 5 // 8 + embedding * 17 // 16
    assert shape.step_bytes(64, 1024) - shape.read_bytes() == 64 * 1024 * 131_072
    small = SHAPES["135m"]
    assert small.read_bytes() == 2 * (small.parameters - 61 * 576)  # the embedding is the output projection


@pytest.mark.parametrize("name", ["tiny", "biased"])
def test_a_checkpoint_is_read_as_its_shape(name: str, tmp_path: Path) -> None:
    """Every tensor is there once, over all shards; a second call leaves the files alone."""
    shape = SHAPES["tiny"] if name == "tiny" else type(SHAPES["tiny"])(9, 32, 64, 4, 2, 8, 300, tied=True, biased=True)
    directory = shape.save(tmp_path / "model", "bfloat16", "cpu")
    files = {file: file.stat().st_mtime_ns for file in directory.iterdir()}
    assert shape.save(directory, "bfloat16", "cpu") == directory
    assert {file: file.stat().st_mtime_ns for file in directory.iterdir()} == files
    assert sum(weight_bytes(directory, torch.bfloat16, None)) == 2 * shape.parameters
    config = ModelConfig.from_directory(directory)
    assert (config.num_layers, config.vocab_size, config.qkv_bias) == (shape.layers, shape.vocabulary, shape.biased)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu", "kernels"])
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main() == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "finds no NVIDIA GPU" in said.err


def test_numbers_are_held_against_their_targets() -> None:
    report = Report(rehearsal=False)
    report.add("slow", Spread(0.84, 0.8, 0.9), "of the copy", "G1")
    report.add("near", Spread(2.0, 1.6, 4.0).under(3.0), "x", "G8")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in report.render("").splitlines()[2:]]
    assert rows[0] == ["slow", "0.840", "of the copy", "0.800 to 0.900", "G1 ≥ 0.85", "no"]
    assert rows[1] == ["near", "1.50", "x", "0.750 to 1.88", "G8 ≤ 1.5", "yes"]
    rehearsed = Report(rehearsal=True)
    rehearsed.add("slow", 0.9, goal="G1")
    assert "rehearsal" in rehearsed.render("")
    assert "yes" not in rehearsed.render("")
    assert {goal.split()[0] for goal in GOALS} == {f"G{n}" for n in range(1, 9)}


def test_a_group_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each has its section, the failed one with what it found before; the next run replaces it and nothing else."""
    monkeypatch.setattr(command, "_heading", lambda: "where and when")

    def fails(report: Report) -> None:
        report.add("found before", 1.0)
        raise RuntimeError("out of luck\nand more")

    file = tmp_path / "results.md"
    file.write_text("# Results\n")
    write_section(file, "kernels: other", "stays")
    options = argparse.Namespace(rehearse=False, command="kernels", write=file)
    assert command.run(options, {"bad": fails, "good": lambda report: report.note("went on")}) == 1
    text = file.read_text()
    for words in ("# Results", "stays", "found before", "FAILED after this: RuntimeError: out of luck\n", "- went on"):
        assert words in text
    assert command.run(options, {"bad": lambda report: report.note("better")}) == 0
    text = file.read_text()
    assert "out of luck" not in text
    assert [text.count(f"<!-- kernels: {name} -->") for name in ("other", "bad", "good")] == [1, 1, 1]
    assert text.index("better") < text.index("went on")
