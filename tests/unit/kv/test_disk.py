"""The disk tier: what is stored is found, by whom it may be, and stays within its cap."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from disk_support import BLOCK, CAP, NAMESPACE, SLOT, contents, files, matched, open_tier, read_checked, store
from foreword.kv.disk import index as disk_index
from foreword.kv.disk import tier as disk
from foreword.kv.disk import writer as disk_writer
from foreword.kv.disk.tier import DiskTier
from foreword.kv.namespace import Namespace

TOKENS = list(range(100, 122))  # five blocks and a half


Patch = pytest.MonkeyPatch
Opened = Callable[..., DiskTier]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens tiers, in the test's directory unless said otherwise, and closes them."""
    tiers: list[DiskTier] = []

    def open_one(directory: Path = tmp_path, **options: Any) -> DiskTier:
        tiers.append(open_tier(directory, **options))
        return tiers[-1]

    yield open_one
    for tier in tiers:
        tier.close()


@pytest.fixture
def tier(opened: Opened) -> DiskTier:
    return opened()


def test_round_trip(tier: DiskTier) -> None:
    """Every block comes back, into new memory or into the caller's, the part-filled last one too."""
    assert tier.lookup(TOKENS, 0, 22) == []
    assert store(tier, TOKENS)
    refs = tier.lookup(TOKENS, 0, 22)
    assert [ref.num_tokens for ref in refs] == [4, 4, 4, 4, 4, 2]
    into = bytearray(BLOCK * SLOT)
    for ref, expected in zip(refs, contents(TOKENS), strict=True):
        assert tier.read(ref) == expected
        assert tier.read(ref, into) == into == expected
    stats = tier.stats
    assert (stats.blocks, stats.writes, stats.hits) == (6, 6, 12)
    assert (stats.dropped, stats.evictions, stats.corrupt) == (0, 0, 0)


def test_a_lookup_ends_at_its_limit_and_starts_anywhere(tier: DiskTier) -> None:
    """Matches are exact to the token, from every border, to every limit, and inside blocks that differ further on."""
    store(tier, TOKENS)
    for start in range(0, 24, BLOCK):
        for limit in range(start, 23):
            assert matched(tier.lookup(TOKENS, start, limit)) == limit - start
    for differs in range(22):
        changed = [*TOKENS[:differs], 9, *TOKENS[differs + 1 :]]
        assert matched(tier.lookup(changed, 0, 22)) == differs
        if differs < 20:
            assert tier.lookup(changed, 20, 22) == []  # same tokens behind another beginning
    assert read_checked(tier, TOKENS[:21]) == 21


def test_a_restart_finds_what_was_stored(opened: Opened, tmp_path: Path) -> None:
    """Closing writes what waits, and the next tier begins with it."""
    first = opened()
    first.write(TOKENS, 0, contents(TOKENS))
    first.close()
    second = opened()
    assert second.stats.blocks == 6
    assert read_checked(second, TOKENS) == 22
    assert second.covered(TOKENS) == 22
    assert second.stats.bytes == sum(path.stat().st_size for path in files(tmp_path))


@pytest.mark.parametrize("part", ["weights", "config", "layout", "adapter", "salt"])
def test_namespaces_share_nothing(opened: Opened, part: str) -> None:
    """Any part that differs, the salt above all, misses; the same one hits."""
    parts: dict[str, Any] = {"weights": "w", "config": "c", "layout": "l", "adapter": "a", "salt": "s"}
    mine = opened(namespace=Namespace(**parts).key())
    store(mine, TOKENS)
    other = opened(namespace=Namespace(**(parts | {part: "other"})).key())
    assert other.lookup(TOKENS, 0, 22) == []
    assert other.covered(TOKENS) == 0
    assert read_checked(opened(namespace=Namespace(**parts).key()), TOKENS) == 22


@pytest.mark.parametrize(("block_size", "block_bytes"), [(8, BLOCK * SLOT), (BLOCK, 2 * BLOCK * SLOT)])
def test_another_geometry_shares_nothing(tier: DiskTier, tmp_path: Path, block_size: int, block_bytes: int) -> None:
    store(tier, TOKENS)
    assert DiskTier(tmp_path, NAMESPACE, block_bytes, block_size, CAP).lookup(TOKENS, 0, 22) == []


def test_sequences_share_their_beginning(tier: DiskTier, tmp_path: Path) -> None:
    """Only what differs is written again; writing twice writes nothing."""
    store(tier, TOKENS)
    branch = [*TOKENS[:10], *range(500, 520)]
    assert tier.covered(branch) == 8
    store(tier, branch)
    assert tier.covered(branch) == 30
    assert tier.stats.writes == 6 + 6
    before = files(tmp_path)
    assert store(tier, branch)
    assert store(tier, TOKENS[:20])
    assert store(tier, TOKENS[:21])
    assert tier.stats.writes == 12
    assert files(tmp_path) == before
    assert read_checked(tier, branch) == 30
    assert read_checked(tier, TOKENS) == 22


def test_a_fuller_block_supersedes(tier: DiskTier, opened: Opened, tmp_path: Path) -> None:
    """A last block that grows leaves one file; one that another covers is not stored."""
    for length in (17, 18, 19, 20):
        store(tier, TOKENS[:length], 16 if length > 17 else 0)
        assert len(files(tmp_path)) == 2
        assert read_checked(tier, TOKENS) == length
        assert matched(opened().lookup(TOKENS, 0, 22)) == length
    assert tier.covered(TOKENS[:18]) == 18
    assert tier.stats.blocks == 5


def test_a_superseded_block_that_another_process_wrote_goes(opened: Opened, tmp_path: Path) -> None:
    """Whatever the order in which files are found, of blocks that begin one another the fullest stays."""
    directory = tmp_path / "others"
    for length in (18, 19, 17):
        store(opened(tmp_path / str(length)), TOKENS[:length])
        for path in files(tmp_path / str(length)):
            target = directory / path.relative_to(tmp_path / str(length))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    assert len(files(directory)) == 4
    assert read_checked(opened(directory), TOKENS) == 19
    assert len(files(directory)) == 2


def test_another_process_is_seen(opened: Opened, tmp_path: Path, monkeypatch: Patch) -> None:
    """What a second tier stores or removes is known to the first at its next miss; no file of it is read twice."""
    monkeypatch.setattr(disk, "SCAN_SHARE", 0)
    first, second = opened(), opened()
    loads: list[str] = []
    load = first._files.load
    monkeypatch.setattr(first._files, "load", lambda name, inode: (loads.append(name), load(name, inode))[1])
    store(second, TOKENS)
    assert read_checked(first, TOKENS) == 22
    store(second, [7, *TOKENS])
    assert read_checked(first, [7, *TOKENS]) == 23
    assert len(loads) == len(set(loads)) == len(files(tmp_path))
    for path in files(tmp_path):
        path.unlink()
    assert first.lookup(TOKENS, 0, 22) != []  # not known yet; reading tells
    assert first.lookup([8], 0, 1) == []
    assert first.stats.blocks == 0
    assert first.lookup(TOKENS, 0, 22) == []


def test_an_unchanged_folder_is_not_looked_through(tier: DiskTier, monkeypatch: Patch) -> None:
    """A miss costs one look at the folder's time, once that is old enough to show every change."""
    monkeypatch.setattr(disk, "SCAN_SHARE", 0)
    store(tier, TOKENS)
    os.utime(tier._files.folder, (1.0, 1.0))
    listings: list[None] = []
    names = tier._files.names
    monkeypatch.setattr(tier._files, "names", lambda: (listings.append(None), names())[1])
    for _ in range(5):
        assert tier.lookup([1, 2, 3], 0, 3) == []
    assert len(listings) == 1
    store(tier, [1, 2, 3])
    assert matched(tier.lookup([1, 2, 3, 4], 0, 4)) == 3
    assert len(listings) == 2


def test_a_change_within_the_same_instant_is_seen(opened: Opened, tmp_path: Path, monkeypatch: Patch) -> None:
    """Coarse clocks: a folder that has just changed may change again and show the same time."""
    monkeypatch.setattr(disk, "SCAN_SHARE", 0)
    first, second = opened(), opened()
    store(second, TOKENS)
    folder = files(tmp_path)[0].parent
    now = time.time_ns()
    os.utime(folder, ns=(now, now))
    assert first.lookup([1, 2], 0, 2) == []
    store(second, [1, 2])
    os.utime(folder, ns=(now, now))
    assert matched(first.lookup([1, 2], 0, 2)) == 2


def used(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*/*"))


def test_the_cap_holds_over_all_namespaces(opened: Opened, tmp_path: Path, monkeypatch: Patch) -> None:
    """Before anything is published there is room for it, whoever wrote what has to go."""
    monkeypatch.setattr(disk, "TOUCH_SECONDS", 0.0)
    cap = 40 * BLOCK * SLOT
    tiers = [opened(namespace=bytes([i]) * 32, max_bytes=cap) for i in range(3)]
    totals = []
    rename = os.rename
    monkeypatch.setattr(os, "rename", lambda *paths: (totals.append(used(tmp_path)), rename(*paths))[1])
    for number in range(30):
        tokens = [number] * 17
        store(tiers[number % 3], tokens)
        assert read_checked(tiers[number % 3], tokens) == 17
        assert used(tmp_path) <= cap
    assert len(totals) == 60
    assert max(totals) <= cap
    assert sum(tier.stats.evictions for tier in tiers) == 60 - len(files(tmp_path)) > 20
    for tier in tiers:
        for number in range(30):
            read_checked(tier, [number] * 17)
        assert tier.stats.corrupt == 0


def test_what_is_used_stays_and_tails_go_before_heads(opened: Opened, tmp_path: Path, monkeypatch: Patch) -> None:
    """A beginning in use outlives later sequences, what follows it goes from its end, and the latest are all there."""
    monkeypatch.setattr(disk, "TOUCH_SECONDS", 0.0)
    monkeypatch.setattr(disk, "SEGMENT_BYTES", 1)  # a file per block
    tier = opened(max_bytes=24 * (BLOCK * SLOT + 4096))
    old = list(range(40))
    store(tier, old)
    for number in range(30):
        store(tier, [900 + number] * 8)
        assert tier.covered(old[:8]) == 8  # found in memory, as far as the tier knows
        assert read_checked(tier, [*old[:12], 77]) == 12
        depths = [int(path.name[:8]) for path in files(tmp_path)]
        assert [depth for depth in depths if depth > 1] == list(range(2, 2 + len(depths) - sum(d < 2 for d in depths)))
    assert matched(tier.lookup(old, 0, 40)) == 12
    assert all(matched(tier.lookup([920 + number] * 8, 0, 8)) == 8 for number in range(10))
    assert tier.lookup([900] * 8, 0, 8) == []


def test_a_cap_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="max_bytes is 4096, and one block takes 8192"):
        open_tier(tmp_path, max_bytes=4096)


def test_wrong_arguments_are_named(tier: DiskTier) -> None:
    with pytest.raises(ValueError, match="start is 3: it must be a multiple of 4"):
        tier.lookup(TOKENS, 3, 22)
    with pytest.raises(ValueError, match=r"5 payloads for the 6 blocks of tokens\[0:22\]"):
        tier.write(TOKENS, 0, contents(TOKENS)[:5])
    with pytest.raises(ValueError, match="a payload has 10 bytes, and a block 4096"):
        tier.write(TOKENS[:4], 0, [bytes(10)])
    store(tier, TOKENS)
    with pytest.raises(ValueError, match="into has 10 bytes, and a block 4096"):
        tier.read(tier.lookup(TOKENS, 0, 22)[0], bytearray(10))


def test_a_full_queue_drops_and_counts(tier: DiskTier, monkeypatch: Patch) -> None:
    """What waits is bounded: more is refused at once, and accepted again later."""
    monkeypatch.setattr(disk_writer, "QUEUE_BYTES", 8 * BLOCK * SLOT)
    gate = threading.Event()
    make_room = tier._files.make_room
    monkeypatch.setattr(tier._files, "make_room", lambda: (gate.wait(10), make_room())[1])
    assert tier.write(TOKENS, 0, contents(TOKENS))
    assert tier.covered(TOKENS) == 22  # about to be written
    assert tier.lookup(TOKENS, 0, 22) == []
    other = list(range(12))
    assert not tier.write(other, 0, contents(other))
    assert tier.stats.dropped == 3
    assert tier.covered(other) == 0
    gate.set()
    tier.flush()
    assert store(tier, other)
    assert read_checked(tier, TOKENS) == 22
    assert read_checked(tier, other) == 12


def test_nothing_is_written_after_close(tier: DiskTier) -> None:
    """Closing ends the thread; reading goes on."""
    threads = set(threading.enumerate())
    store(tier, TOKENS)
    tier.close()
    assert not tier.write([1, 2, 3, 4], 0, contents([1, 2, 3, 4]))
    assert read_checked(tier, TOKENS) == 22
    assert set(threading.enumerate()) <= threads


def test_tokens_are_compared_not_only_hashed(opened: Opened, monkeypatch: Patch) -> None:
    """With a hash under which all blocks collide, a match still ends where the tokens differ."""
    for module in (disk, disk_index):
        monkeypatch.setattr(module, "block_keys", lambda _parent, blocks: [bytes(32) for _ in blocks])
    tier = opened()
    store(tier, TOKENS[:4])
    assert matched(tier.lookup(TOKENS[:4], 0, 4)) == 4
    assert matched(tier.lookup([*TOKENS[:3], 9], 0, 4)) == 3
    assert tier.lookup([9, 9, 9, 9], 0, 4) == []


def test_a_block_in_two_files_outlives_one_of_them(opened: Opened, tmp_path: Path, monkeypatch: Patch) -> None:
    """Two processes that store overlapping sequences at once both succeed, and the later file serves both."""
    monkeypatch.setattr(disk, "SCAN_SHARE", 0)
    first, second = opened(), opened()
    store(first, TOKENS[:8])
    store(second, TOKENS[:20])
    short, long = sorted(files(tmp_path), key=lambda path: path.stat().st_size)
    assert read_checked(first, TOKENS) == 20
    short.unlink()
    assert first.lookup([9], 0, 1) == []  # looks at the folder
    assert read_checked(first, TOKENS) == 20
    assert first.stats.bytes == long.stat().st_size


def in_common(a: list[int], b: list[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


tokens_lists = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@given(stored=st.lists(tokens_lists, min_size=1, max_size=8), wanted=st.lists(tokens_lists, min_size=1, max_size=8))
def test_lookup_against_a_model(stored: list[list[int]], wanted: list[list[int]]) -> None:
    """The match is the longest beginning in common with anything stored; a restart changes nothing."""
    with tempfile.TemporaryDirectory() as directory, Patch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)  # for speed
        tier = open_tier(Path(directory))
        for tokens in stored:
            covered = tier.covered(tokens)
            store(tier, tokens, covered // BLOCK * BLOCK if covered < len(tokens) else 0)
        again = open_tier(Path(directory))
        for tokens in [*wanted, *stored]:
            model = max(in_common(tokens, other) for other in stored)
            assert read_checked(tier, tokens) == model
            assert read_checked(again, tokens) == model
            for start in range(0, model + 1, BLOCK):
                assert matched(again.lookup(tokens, start, len(tokens))) == model - start
        tier.close()
