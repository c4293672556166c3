"""What is kept on disk: a later engine goes on with it, to the bit, or computes as if it were not there."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine
from foreword.kv.store import DiskStore
from foreword.kv.tier import Transfer
from foreword.ops.cpu.native.library import available
from support import assert_idle, assert_same_bits, generate_recorded, random_ids

NewEngine = Callable[..., Engine]
OPTIONS: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
PROMPT = random_ids(5, 77)


@pytest.fixture
def reopened(new_tiny: NewEngine, tmp_path: Path) -> NewEngine:
    """An engine on the same directory; the one before is closed first, and everything it wrote is there."""
    last: list[Engine] = []

    def make(**options: Any) -> Engine:
        for engine in last:
            engine.close()
        last[:] = [new_tiny(**{"cache_dir": tmp_path / "kv", "block_size": 16, **options})]
        return last[0]

    return make


def test_a_restart_goes_on_where_the_last_process_ended(reopened: NewEngine) -> None:
    first = reopened()
    expected = generate_recorded(first, [PROMPT], **OPTIONS)
    answer = expected[0][0]
    second = reopened()
    output = second.generate(PROMPT, **OPTIONS)
    assert output.usage.cached_tokens == len(PROMPT) - 1
    assert second.stats().tokens_restored == len(PROMPT) - 1
    third = reopened()
    assert_same_bits(generate_recorded(third, [PROMPT], **OPTIONS), expected)
    turn = reopened().generate([*PROMPT, *answer, 7, 8], **OPTIONS)
    assert turn.usage.cached_tokens == len(PROMPT) + len(answer) - 1  # the last sampled token has no KV


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_int8_kv_comes_back_with_its_scales(reopened: NewEngine, kernels: str) -> None:
    """Whole blocks and a part of one."""
    options = {"kernels": kernels, "kv_cache_dtype": "int8"}
    expected = generate_recorded(reopened(**options), [PROMPT], **OPTIONS)
    engine = reopened(**options)
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    assert engine.stats().tokens_restored == len(PROMPT) - 1
    turn = reopened(**options).generate([*PROMPT, *expected[0][0], 7, 8], **OPTIONS)
    assert turn.usage.cached_tokens == len(PROMPT) + len(expected[0][0]) - 1


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 31, 32, 33, 64])
def test_every_length_comes_back_whole(reopened: NewEngine, length: int) -> None:
    prompt = random_ids(length, length)
    expected = generate_recorded(reopened(), [prompt], **OPTIONS)
    engine = reopened()
    assert_same_bits(generate_recorded(engine, [prompt], **OPTIONS), expected)
    assert engine.stats().tokens_reused == length - 1
    assert_idle(engine)


def test_memory_and_disk_together(reopened: NewEngine) -> None:
    """A beginning in memory, its end on disk, a border inside a block: each token from where it is."""
    expected = generate_recorded(reopened(), [PROMPT], **OPTIONS)
    engine = reopened()
    engine.generate(PROMPT[:21], max_tokens=1)  # 20 of them restored, and one computed
    assert engine.stats().tokens_restored == 20
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    assert engine.stats().tokens_restored == 20 + len(PROMPT) - 1 - 21
    assert engine.stats().tokens_reused == 20 + len(PROMPT) - 1


def test_what_memory_evicts_the_disk_still_has(reopened: NewEngine) -> None:
    engine = reopened(blocks=10)
    expected = generate_recorded(engine, [PROMPT], **OPTIONS)
    for seed in range(4):
        engine.generate(random_ids(100 + seed, 90), max_tokens=4)
    engine.save()
    before = engine.stats()
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    assert engine.stats().tokens_restored > before.tokens_restored
    assert engine.stats().tokens_reused - before.tokens_reused == len(PROMPT) - 1


def test_preempted_requests_are_restored(reopened: NewEngine, new_tiny: NewEngine) -> None:
    prompts = [random_ids(seed, 40) for seed in range(6)]
    options = {**OPTIONS, "max_tokens": 30}
    expected = generate_recorded(new_tiny(block_size=16), prompts, **options)
    engine = reopened(blocks=12)
    assert_same_bits(generate_recorded(engine, prompts, **options), expected)
    assert engine.stats().preemptions > 0
    assert_idle(engine)


def test_salts_and_everything_else_that_kv_depends_on_keep_apart(
    reopened: NewEngine, tiny_dir: Path, tmp_path: Path
) -> None:
    """A change of salt, weights, RoPE, dtype, block size or kernels misses; the same again hits."""
    from safetensors.torch import load_file, save_file

    reopened().generate(PROMPT, cache_salt="a", **OPTIONS)

    def cached(model: Path | None = None, **options: Any) -> int:
        salt = options.pop("cache_salt", "a")
        engine = Engine(str(model), **_tiny(**options)) if model else reopened(**options)
        try:
            explained = engine.explain(PROMPT, cache_salt=salt)
            found = engine.generate(PROMPT, max_tokens=1, cache_salt=salt).usage.cached_tokens
            assert explained.matched_tokens in (found, found + 1)
            return found
        finally:
            engine.close()

    def _tiny(**options: Any) -> dict[str, Any]:
        from support import tiny_options

        return tiny_options(**{"cache_dir": tmp_path / "kv", "block_size": 16, **options})

    other_weights, other_rope = tmp_path / "weights", tmp_path / "rope"
    for copy in (other_weights, other_rope):
        shutil.copytree(tiny_dir, copy)
    [file] = other_weights.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][3] += 2**-12  # one number, in the middle of the file
    save_file(weights, file, metadata={"format": "pt"})
    config = json.loads((other_rope / "config.json").read_text())
    (other_rope / "config.json").write_text(json.dumps(config | {"rope_theta": 20000.0, "rope_parameters": None}))

    hit = len(PROMPT) - 1
    assert cached() == hit
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt=None) == 0
    assert cached(other_weights) == 0
    assert cached(other_rope) == 0
    assert cached(dtype="bfloat16") == 0
    assert cached(kv_cache_dtype="int8") == 0
    assert cached(kv_cache_dtype="int8", dtype="bfloat16") == 0  # of other weights
    assert cached(block_size=32) == 0
    if available():
        assert cached(kernels="torch") == 0
        assert cached(kernels="portable") == 0
    assert cached() == hit
    assert cached(cache_salt="b") == hit  # its own by now
    assert cached(other_weights) == hit


@pytest.mark.parametrize("damage", ["flip", "truncate", "empty", "foreign", "gone"])
def test_damaged_files_are_computed_again(
    reopened: NewEngine, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    first = reopened()
    expected = generate_recorded(first, [PROMPT], **OPTIONS)
    first.close()
    files = sorted((tmp_path / "kv").rglob("*.kv"))
    assert files
    for number, file in enumerate(files):
        content = bytearray(file.read_bytes())
        if damage == "flip":
            content[(number * 7919 + len(content) // 2) % len(content)] ^= 16
        replaced = {
            "flip": bytes(content),
            "truncate": bytes(content[: len(content) // 2]),
            "empty": b"",
            "foreign": b"not one of ours" * 999,
        }
        file.unlink()
        if damage != "gone":
            file.write_bytes(replaced[damage])
    engine = reopened()
    assert_same_bits(generate_recorded(engine, [PROMPT], **OPTIONS), expected)
    assert engine.stats().tokens_restored < len(PROMPT) - 1
    assert_idle(engine)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_directory_that_cannot_be_used_costs_only_the_cache(
    new_tiny: NewEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    engine = new_tiny(cache_dir=tmp_path / "file" / "kv")
    assert len(engine.generate(PROMPT, **OPTIONS).token_ids) == 12
    engine.close()
    assert any("disk" in record.getMessage() for record in caplog.records if record.levelname == "WARNING")


def test_what_failed_is_not_kept(reopened: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reopened()
    runner = engine._loop.core.runner

    def broken(*_: Any) -> Any:
        raise RuntimeError("planted")

    monkeypatch.setattr(runner, "_sample", broken)
    with pytest.raises(Exception, match="planted"):
        engine.generate(PROMPT, **OPTIONS)
    monkeypatch.undo()
    assert reopened().generate(PROMPT, **OPTIONS).usage.cached_tokens == 0


def test_an_explanation_agrees_with_what_was_restored(reopened: NewEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk gives less than it showed, because a file has just gone."""
    reopened().generate(PROMPT, **OPTIONS)
    engine = reopened()
    monkeypatch.setattr(DiskStore, "load", lambda *_: Transfer(lambda _: 0, lambda: None))
    output = engine.generate(PROMPT, **OPTIONS)
    assert output.usage.cached_tokens == 0
    assert output.prefix is not None
    assert output.prefix.matched_tokens == output.prefix.position == 0


def test_a_prompt_that_diverges_from_one_on_disk_is_told_so(reopened: NewEngine) -> None:
    """A new process has no log of prompts; the files know their tokens."""
    reopened().generate(PROMPT, **OPTIONS)
    engine = reopened()
    changed = [*PROMPT[:40], (PROMPT[40] + 1) % 256, *PROMPT[41:]]
    found = engine.explain(changed)
    assert (found.reason, found.position) == ("diverged", 40)
    assert found.expected_text.startswith(engine._client.tokenizer.decode(PROMPT[40:44]))
    output = engine.generate(changed, **OPTIONS)
    assert output.prefix is not None
    assert (output.prefix.reason, output.prefix.matched_tokens, output.usage.cached_tokens) == ("diverged", 40, 40)


def test_an_explanation_agrees_with_a_block_that_could_not_be_copied(new_tiny: NewEngine) -> None:
    """A match that ends inside a block needs a block more, for the copy's source."""
    engine = new_tiny(blocks=8, block_size=16)
    engine.generate(random_ids(1, 123), max_tokens=1)
    output = engine.generate(random_ids(1, 123), max_tokens=1)
    assert output.prefix is not None
    assert (output.prefix.matched_tokens, output.usage.cached_tokens) == (112, 112)
    assert output.prefix.reason == "evicted"


def test_too_small_a_cap_is_refused(new_tiny: NewEngine, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_disk_cache"):
        new_tiny(cache_dir=tmp_path, max_disk_cache=1000)


def answered(directory: str, text: str) -> tuple[list[int], list[Any]]:
    """By the real model: prompt tokens and how many of them were reused; tokens and logits."""
    with Engine("smollm2-135m", kv_cache_memory="96MiB", cache_dir=directory) as engine:
        prompt = engine.encode(text)
        [(tokens, logits)] = generate_recorded(engine, [prompt], temperature=0.0, max_tokens=4, ignore_eos=True)
        return [len(prompt), engine.stats().tokens_reused], [
            tokens,
            logits.view(-1)[::97].tolist(),
            float(logits.sum()),
        ]


PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[1])
from faults.test_restart import answered
print(json.dumps(answered(*sys.argv[2:])))
"""


def test_a_second_process_answers_with_the_first_ones_prefix(tmp_path: Path) -> None:
    """The real model, another process: all but one token cached, and logits equal to the last bit."""
    text = "The keeper of the lighthouse counted the ships that passed in the night, and wrote them down. " * 6
    (length, reused), cold = answered(str(tmp_path), text)
    command = [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1]), str(tmp_path), text]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    (_, warm_reused), warm = json.loads(done.stdout)
    assert (reused, warm_reused) == (0, length - 1)
    assert warm == cold


EXIT = """
import sys
sys.path.insert(0, sys.argv[1])
from foreword import Engine
from support import random_ids, tiny_options
engine = Engine(sys.argv[2], **tiny_options(), cache_dir=sys.argv[3])
print(engine.explain(random_ids(5, 77)).matched_tokens)
stream = engine.stream(random_ids(5, 77), max_tokens=1000, ignore_eos=True)
next(iter(stream))
"""


def test_a_program_that_ends_in_the_middle_keeps_its_prompt(
    tiny_dir: Path, tmp_path: Path, new_tiny: NewEngine
) -> None:
    """Without ``close``, and while it generates."""
    arguments = [str(Path(__file__).parent.parent), str(tiny_dir), str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", EXIT, *arguments], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert new_tiny(cache_dir=tmp_path).explain(random_ids(5, 77)).matched_tokens == 77
