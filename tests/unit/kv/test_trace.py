"""Traces of the cache: what is written, what can be read, what is never in them."""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from foreword import Engine
from foreword.kv.trace import TraceRecorder, read_trace

NS, OTHER = b"one", b"two"


def recorder(path: Path, block_size: int = 4) -> TraceRecorder:
    return TraceRecorder(str(path), block_size, 100)


def record(trace: TraceRecorder, tokens: list[int], at: float = 0.0, namespace: bytes = NS, **fields: Any) -> None:
    trace.record(namespace, tokens, num_prompt=fields.pop("num_prompt", len(tokens)), admitted_s=at, **fields)


def test_equal_prefixes_are_equal_hashes(tmp_path: Path) -> None:
    """A block's hash stands for its tokens, all before them and the namespace; part-filled blocks have none."""
    path = tmp_path / "trace"
    trace = recorder(path)
    for at, tokens in enumerate(([1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 5, 6, 7, 9], [9, 2, 3, 4, 5, 6, 7, 8])):
        record(trace, tokens, float(at))
    record(trace, [1, 2, 3, 4], 3.0, OTHER, priority=2, num_prompt=2)
    trace.close()
    first, second, third, other = read_trace(str(path)).requests
    assert [len(each.blocks) for each in (first, second, third, other)] == [2, 2, 2, 1]
    assert first.blocks[0] == second.blocks[0]
    assert len({*first.blocks, *second.blocks, *third.blocks, *other.blocks}) == 6
    assert first.namespace == third.namespace != other.namespace
    assert [(each.prompt, each.tokens, each.priority) for each in (first, other)] == [(9, 9, 0), (2, 4, 2)]


def test_requests_come_in_the_order_of_their_admission(tmp_path: Path) -> None:
    """Lines are written as requests end."""
    trace = recorder(tmp_path / "trace")
    for at in (3.0, 1.0, 2.0):
        record(trace, [int(at)] * 4, at)
    trace.close()
    times = [request.at for request in read_trace(str(tmp_path / "trace")).requests]
    assert [round(at - times[0], 3) for at in times] == [0.0, 1.0, 2.0]


def test_each_file_has_a_key_of_its_own(tmp_path: Path) -> None:
    """The same tokens in two traces cannot be recognised."""
    blocks = []
    for name in ("a", "b"):
        trace = recorder(tmp_path / name)
        record(trace, [1, 2, 3, 4])
        trace.close()
        blocks += read_trace(str(tmp_path / name)).requests[0].blocks
    assert blocks[0] != blocks[1]


def test_a_trace_is_continued(tmp_path: Path) -> None:
    """Opened again it goes on under the same key, behind a line that was cut as well."""
    path = tmp_path / "trace"
    for _ in range(2):
        trace = recorder(path)
        record(trace, [1, 2, 3, 4])
        trace.close()
        trace.close()
        record(trace, [1, 2, 3, 4])  # after the end: ignored
        with path.open("ab") as file:
            file.write(b'{"at": 1.0, "names')
    requests = read_trace(str(path)).requests
    assert [request.blocks for request in requests] == [requests[0].blocks] * 2
    assert path.read_bytes().count(b"foreword_cache_trace") == 1


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"Dear diary,\n", "no trace"),
        (b'{"foreword_cache_trace": 99}\n', "version"),
        (b'{"foreword_cache_trace":1,"block_size":8,"num_blocks":9,"salt":"00"}\n', "blocks of 8 tokens"),
        (None, "directory"),
    ],
)
def test_something_else_is_never_written_to(tmp_path: Path, content: bytes | None, reason: str) -> None:
    """A file that is no trace, or of other blocks, or no file, is refused and stays as it was."""
    path = tmp_path / "file"
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(ValueError, match=f"(?i)cache_trace=.*{reason}"):
        recorder(path)
    assert content is None or path.read_bytes() == content
    with pytest.raises(ValueError, match=r"cache_trace=.*without \.gz"):
        recorder(tmp_path / "trace.gz")
    with pytest.raises(ValueError, match=r"cache_trace=.*cannot be recorded to"):
        recorder(tmp_path / "missing" / "trace")


def test_the_buffer_is_bounded(tmp_path: Path) -> None:
    """What waits is written before it passes 64 KiB and a line."""
    trace = recorder(tmp_path / "trace", 1)
    most = 0
    for at in range(2000):
        record(trace, list(range(50)), float(at))
        most = max(most, trace._buffered)
    assert 60_000 < most < 70_000
    written = (tmp_path / "trace").stat().st_size
    assert written > 1_000_000
    trace.close()
    assert len(read_trace(str(tmp_path / "trace")).requests) == 2000


def test_an_error_ends_the_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A full disk is reported once; what comes after is not recorded and costs nobody anything."""
    trace = recorder(tmp_path / "trace", 1)
    trace._file.close()
    trace._file = _FullDisk()
    with caplog.at_level(logging.WARNING, logger="foreword"):
        for at in range(500):
            record(trace, list(range(50)), float(at))
        trace.close()
    assert [record.message for record in caplog.records if "cache_trace" in record.message] == [
        f"cache_trace='{tmp_path / 'trace'}' cannot be written ([Errno 28] No space left on device); "
        "the recording ends here"
    ]


class _FullDisk:
    def write(self, _: bytes) -> None:
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "line",
    [
        {"at": 1.0, "namespace": "00", "priority": 0, "prompt": 4, "tokens": 8, "blocks": "00" * 8},
        {"at": 1.0, "namespace": "00", "priority": 0, "prompt": 9, "tokens": 4, "blocks": "00" * 8},
        {"at": 1.0, "namespace": "00", "priority": 0, "prompt": 4, "tokens": 4, "blocks": "00" * 7},
        {"at": 1.0, "namespace": "xx", "priority": 0, "prompt": 4, "tokens": 4, "blocks": "00" * 8},
        {"at": "noon", "namespace": "00", "priority": 0, "prompt": 4, "tokens": 4, "blocks": "00" * 8},
        {"at": 1.0},
        [1, 2],
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: Any) -> None:
    """A line that says something else is an error, with its number, not a wrong result."""
    path = tmp_path / "trace"
    recorder(path).close()
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")
    with pytest.raises(ValueError, match=r"trace: line 2 is no request"):
        read_trace(str(path))


def test_compressed_traces_are_read(tmp_path: Path) -> None:
    """A trace that was compressed is the same trace."""
    trace = recorder(tmp_path / "trace")
    record(trace, [1, 2, 3, 4])
    trace.close()
    (tmp_path / "trace.gz").write_bytes(gzip.compress((tmp_path / "trace").read_bytes()))
    assert read_trace(str(tmp_path / "trace.gz")) == read_trace(str(tmp_path / "trace"))


def test_an_engine_records_its_requests(tmp_path: Path, new_tiny: Callable[..., Engine]) -> None:
    """One line per admitted completion, generated tokens included; no text, and nothing of a request never admitted."""
    path = tmp_path / "trace"
    engine = new_tiny(cache_trace=path, block_size=16, eviction_policy="lfu")
    prompt = "The sea is wide and deep, and the ships go down to it every morning."
    output = engine.generate(prompt, max_tokens=40, temperature=0, ignore_eos=True)
    engine.generate(prompt, max_tokens=4, n=2, seed=1, cache_priority=-1, ignore_eos=True)
    engine.generate(prompt, max_tokens=4, cache_salt="tenant", ignore_eos=True)
    engine.close()
    content = path.read_text()
    assert "sea" not in content
    assert "tenant" not in content
    header, requests = read_trace(str(path))
    assert (header.block_size, header.num_blocks) == (16, 256)
    first, *forks, salted = requests
    num_prompt = output.usage.prompt_tokens
    assert (first.prompt, first.tokens) == (num_prompt, num_prompt + 39)  # the last token never had KV
    assert sorted(fork.prompt for fork in forks) == [0, num_prompt]
    assert {fork.priority for fork in forks} == {-1}
    shared = num_prompt // 16
    assert all(fork.blocks[:shared] == first.blocks[:shared] for fork in forks)
    assert salted.namespace != first.namespace
    assert not set(salted.blocks) & set(first.blocks)
