"""The KV cache manager: finds cached prefixes, hands out blocks, keeps what was computed, evicts what is least wanted.

Bookkeeping only: numbers of blocks and tokens. Question methods (``lookup``, ``can_allocate``, ``can_grow``) change
nothing; action methods (``allocate``, ``grow``) trust their answers.
"""

from __future__ import annotations

from foreword.core.validation import reject
from foreword.kv.blocks import BlockAllocator
from foreword.kv.eviction import EvictionPolicy, EvictionQueue, NodeStats, segmented_lru
from foreword.kv.explain import Evidence, Stop, find_stop
from foreword.kv.pins import Pin, PinKey, PinLedger, Pinned
from foreword.kv.prompt_log import PromptLog
from foreword.kv.table import BlockCopy, BlockTable
from foreword.kv.trace import TraceRecorder
from foreword.kv.tree import Node, PrefixMatch, PrefixTree, holder_before

_SHOWN = 512
"""Tokens behind the end of a match that an explanation looks at."""


class KVCacheManager:
    """All KV blocks of one pool.

    Args:
        num_blocks: blocks of the pool.
        first_block: their lowest number.
        block_size: tokens per block.
        policy: which cached blocks are evicted first.
        enable_prefix_caching: off, nothing is looked up or kept.
        max_pinned_blocks: pins hold so many blocks at most; None allows a quarter of the pool.
        trace: the scheduler tells it about each finished request; None records nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        first_block: int = 0,
        policy: EvictionPolicy = segmented_lru,
        enable_prefix_caching: bool = True,
        max_pinned_blocks: int | None = None,
        trace: TraceRecorder | None = None,
    ) -> None:
        self.block_size = block_size
        self.enabled = enable_prefix_caching
        self.allocator = BlockAllocator(num_blocks, first_block)
        self.evictions = 0
        self.log = PromptLog()
        self.trace = trace
        self.pins = PinLedger(num_blocks // 4 if max_pinned_blocks is None else max_pinned_blocks)
        self._policy = policy
        self._trees: dict[bytes, PrefixTree] = {}
        self._nothing = PrefixTree(block_size)  # of namespaces that have none yet
        self._queue: EvictionQueue[Node] = EvictionQueue()
        self._copies: list[BlockCopy] = []
        self._clock = 0
        self._age = 0.0  # the highest value that was evicted

    @property
    def num_available(self) -> int:
        """Blocks that can be had: free ones and cached ones that no sequence uses and no pin holds."""
        return self.allocator.num_free + self.allocator.num_evictable

    def could_hold(self, num_tokens: int) -> bool:
        """Whether a sequence of ``num_tokens`` fits when it has all blocks for itself."""
        return self.blocks_for(num_tokens) <= self.allocator.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def lookup(self, namespace: bytes, tokens: list[int], limit: int) -> PrefixMatch:
        """The longest cached prefix of ``tokens[:limit]``. Changes nothing; hand the match to ``allocate`` at once."""
        tree = self._trees.get(namespace, self._nothing)
        return tree.match(tokens, limit if self.enabled else 0)

    def explain(self, namespace: bytes, tokens: list[int]) -> Evidence:
        """Where the match of ``tokens`` ends, and what may tell why. Changes nothing."""
        return Evidence(self.find_stop(namespace, tokens, _SHOWN), *self.log.around(namespace, tokens))

    def find_stop(self, namespace: bytes, tokens: list[int], count: int) -> Stop:
        """Where the longest cached prefix of ``tokens`` ends, and up to ``count`` tokens that are cached behind it."""
        return find_stop(self._trees.get(namespace, self._nothing), tokens, count)

    def can_allocate(self, match: PrefixMatch, num_tokens: int, watermark: int = 0) -> bool:
        """Whether ``allocate`` would find room and leave ``watermark`` blocks available."""
        # evictable now, not once they are in use
        kept = sum(self.allocator.users(block) == 0 for block in match.all_blocks)
        fresh = self.blocks_for(num_tokens) - len(match.blocks)
        return fresh <= self.num_available - kept - watermark

    def allocate(
        self, namespace: bytes, match: PrefixMatch, num_tokens: int, room: int = 0, priority: int = 0
    ) -> BlockTable:
        """Blocks for a sequence of ``num_tokens`` that starts with ``match``; ``room`` tokens may follow later.

        What it computes or reuses is evicted after everything of a lower ``priority``.

        Matched whole blocks are shared. A match that ends inside a block is copied into the sequence's own block
        (copy-on-write), see ``take_copies``.
        """
        committed = len(match.blocks) * self.block_size
        tree = self._tree(namespace)
        node = match.node if match.blocks else tree.root
        node = tree.cut(node, committed)  # what is not reused keeps statistics of its own
        self._touch(node, priority)
        self.allocator.share(match.blocks)
        if match.tail_block is not None:
            self.allocator.share([match.tail_block])  # until the copy is done
        fresh = self._take_blocks(
            self.blocks_for(num_tokens) - len(match.blocks),
            after=match.blocks[-1] if match.blocks else None,
            room=self.blocks_for(room),
        )
        if match.tail_block is not None:
            self._copies.append(BlockCopy(match.tail_block, fresh[0], match.num_tokens - committed))
        return BlockTable(namespace, match.blocks + fresh, match.num_tokens, node, committed, priority)

    def touch(self, match: PrefixMatch) -> None:
        """Count a use of what matched, as an allocation does."""
        self._touch(match.node, 0)

    def can_grow(self, held: BlockTable, num_tokens: int) -> bool:
        """Whether ``grow`` would find room."""
        return self.blocks_for(num_tokens) - len(held.blocks) <= self.num_available

    def grow(self, held: BlockTable, num_tokens: int) -> None:
        """Add blocks until ``num_tokens`` fit."""
        missing = self.blocks_for(num_tokens) - len(held.blocks)
        if missing > 0:
            held.replace(len(held.blocks), self._take_blocks(missing, after=held.blocks[-1] if held.blocks else None))

    def fork(self, held: BlockTable, num_tokens: int) -> BlockTable | None:
        """A second owner of the first ``num_tokens``: whole blocks are shared, a part-filled last one is copied.

        None when there is no block for the copy.
        """
        whole, rest = divmod(num_tokens, self.block_size)
        if rest and self.num_available < 1:
            return None
        shared = held.blocks[:whole]
        self.allocator.share(shared)
        blocks = list(shared)
        if rest:
            source = held.blocks[whole]
            self.allocator.share([source])  # until the copy is done
            blocks += self._take_blocks(1, after=None)
            self._copies.append(BlockCopy(source, blocks[-1], rest))
        return BlockTable(held.namespace, blocks, num_tokens, held.node, held.committed, held.priority)

    def take_copies(self) -> list[BlockCopy]:
        """The copies that must be carried out before the next forward pass; see ``finish_copies``."""
        return list(self._copies)

    def finish_copies(self) -> None:
        """The copies were carried out, or the step that needed them failed: their sources are let go."""
        self.allocator.release(copy.source for copy in self._copies)
        self._copies.clear()

    def commit(self, held: BlockTable, tokens: list[int], num_computed: int) -> None:
        """Keep the blocks that ``tokens[:num_computed]`` fill. Where the tree had the same tokens, its blocks serve."""
        first, last = held.committed // self.block_size, num_computed // self.block_size
        if not self.enabled or last <= first:
            return
        own = held.blocks[first:last]
        held.node, stored = self._tree(held.namespace).insert(held.node, tokens, held.committed, own, held.priority)
        for mine, kept in zip(own, stored, strict=True):
            if mine == kept:
                self.allocator.cache(mine)
            else:
                self.allocator.share([kept])
                self.allocator.release([mine])
        held.replace(first, stored)
        held.committed = last * self.block_size
        self._keep(held, held.node, len(own))

    def release(self, held: BlockTable, tokens: list[int], num_computed: int) -> None:
        """The sequence is done with its blocks; what it computed is kept, the part-filled last block too."""
        self.commit(held, tokens, num_computed)
        if self.enabled and num_computed > held.committed and not self._copies_into(held):
            block = held.blocks[held.committed // self.block_size]
            tree = self._tree(held.namespace)
            leaf = tree.insert_tail(held.node, tokens[:num_computed], held.committed, block, held.priority)
            if leaf is not None:
                self.allocator.cache(block)
                self._keep(held, leaf, 1)
        self.discard(held)

    def discard(self, held: BlockTable) -> None:
        """Let go of the blocks; what was not committed is lost. Copies into them that nobody else awaits are off."""
        for copy in self._copies_into(held):
            if self.allocator.users(copy.target) == 1:
                self._copies.remove(copy)
                self.allocator.release([copy.source])
        self.allocator.release(held.blocks)
        held.blocks = []

    def _copies_into(self, held: BlockTable) -> list[BlockCopy]:
        """Copies still to be carried out: until then the tokens are not there, and should the step fail, never."""
        return [copy for copy in self._copies if copy.target in held.blocks]

    def pin(
        self,
        namespace: bytes,
        tokens: list[int],
        *,
        now_s: float,
        ttl_s: float | None = None,
        renewed: bool = False,
        elsewhere: int = 0,
    ) -> Pinned:
        """Never evict what is cached of ``tokens``, for ``ttl_s`` seconds from ``now_s`` or until it is unpinned.

        A prefix that ends inside a block pins that whole block. What is not cached cannot be pinned: the result says
        how many tokens are, 0 where none was. The same prefix may be pinned several times and then takes as many
        unpins; the longest time asked for counts, and when it has passed all of them lapse. A ``renewed`` pin counts
        once however often it is made, and ends with its time only. The cap counts pinned blocks ``elsewhere`` too.

        Raises:
            ValueError: ``ttl_s`` is not positive.
            PinsFullError: ``max_pinned_blocks`` would be passed; nothing is changed then.
        """
        if ttl_s is not None and not ttl_s > 0:
            reject("ttl", ttl_s, "give a positive number of seconds, or None to pin until it is unpinned")
        self.expire_pins(now_s)
        match = self.lookup(namespace, tokens, len(tokens))
        blocks = match.all_blocks
        if not blocks:
            return Pinned(0, 0)
        self.pins.check_room(blocks, elsewhere)
        key, deadline_s = PinKey(namespace, tuple(tokens), renewed), float("inf") if ttl_s is None else now_s + ttl_s
        pin = Pin(match.num_tokens, blocks, *self._last_place(namespace, match, tokens), 1, deadline_s)
        self.allocator.share(blocks)  # a pin uses its blocks like a sequence that never ends
        earlier = self.pins.get(key)
        if earlier is not None:
            self._drop_pin(key)
            times = 1 if renewed else earlier.times + 1
            pin = pin._replace(times=times, deadline_s=max(deadline_s, earlier.deadline_s))
        self.pins.add(key, pin)
        return Pinned(match.num_tokens, len(blocks))

    def unpin(self, namespace: bytes, tokens: list[int]) -> bool:
        """Take one pin of exactly ``tokens`` back. False if there is none (it was never made, or has lapsed)."""
        key = PinKey(namespace, tuple(tokens))
        pin = self.pins.get(key)
        if pin is None:
            return False
        if pin.times > 1:
            self.pins.lower(key)
        else:
            self._drop_pin(key)
        return True

    def expire_pins(self, now_s: float) -> None:
        """Let pins lapse whose time has passed. Costs a comparison when there is none."""
        while (key := self.pins.next_lapsed(now_s)) is not None:
            self._drop_pin(key)

    def drop_oldest_pin(self) -> bool:
        """Take the oldest pin back, however often it was made; False if there is none."""
        key = self.pins.oldest
        if key is not None:
            self._drop_pin(key)
        return key is not None

    def reset(self) -> int:
        """Forget every cached block that no sequence uses and no pin holds. Returns how many."""
        count = self.allocator.num_evictable
        self._evict(count)
        return count

    def check_integrity(self) -> None:
        """Raises ``AssertionError`` unless free + held + cached = all and the trees are in order."""
        self.allocator.check_integrity()
        self.pins.check_integrity()
        cached: list[int] = []
        for tree in self._trees.values():
            tree.check_integrity()
            for node in tree.nodes():
                cached += node.blocks
        assert len(cached) == len(set(cached)) == self.allocator.num_cached, "a cached block is in no node, or in two"
        pinned = {block for block in cached if self.pins.count(block)}
        assert len(pinned) == self.pins.num_blocks, "a pinned block is not cached"
        assert all(self.allocator.users(block) >= self.pins.count(block) for block in pinned), "a pin holds nothing"

    def close(self) -> None:
        """Write out what is left of the trace."""
        if self.trace is not None:
            self.trace.close()

    def _last_place(self, namespace: bytes, match: PrefixMatch, tokens: list[int]) -> tuple[Node, int]:
        """Where the last block of a match lies: a node, and a position behind the block's first token."""
        size, node = self.block_size, match.node
        if match.tail_block is None:
            return node, match.num_tokens
        if node.end <= len(match.blocks) * size:  # not inside it, so in a child
            child, _ = self._tree(namespace).closest_child(node, tokens, node.end, len(tokens))
            assert child is not None
            node = child
        return node, len(match.blocks) * size + 1

    def _drop_pin(self, key: PinKey) -> None:
        pin = self.pins.remove(key)
        self.allocator.release(pin.blocks)
        self._enqueue(holder_before(pin.node, pin.end))  # the queue lets go of leaves that end in a pinned block

    def _tree(self, namespace: bytes) -> PrefixTree:
        tree = self._trees.get(namespace)
        if tree is None:
            tree = self._trees[namespace] = PrefixTree(self.block_size)
        return tree

    def _keep(self, held: BlockTable, node: Node, num_blocks: int) -> None:
        """Account for blocks that entered the tree, and drop a shorter version of the same last block."""
        self._clock += num_blocks
        node.last_access, node.age = self._clock, self._age
        node.priority = max(node.priority, held.priority)
        tree = self._tree(held.namespace)
        while (tail := tree.shorter_tail(node)) is not None and self.allocator.users(tail.blocks[0]) == 0:
            self._queue.discard(tail)
            self.allocator.uncache(tail.drop_last_block(self.block_size))
        self._enqueue(node)

    def _touch(self, node: Node, priority: int) -> None:
        """A request reuses ``node`` and all above it."""
        self._clock += 1
        step: Node | None = node
        while step is not None and step.parent is not None:
            step.last_access, step.age = self._clock, self._age
            step.hits += 1
            step.priority = max(step.priority, priority)
            self._enqueue(step)
            step = step.parent

    def _enqueue(self, node: Node) -> None:
        if not node.children and node.parent is not None:
            self._queue.push(node, self._value(node), node.priority)

    def _value(self, node: Node) -> float:
        capacity, depth = self.allocator.num_blocks, self.blocks_for(node.end)
        return self._policy(NodeStats(node.last_access, node.hits, capacity, node.branches, depth, node.age))

    def _take_blocks(self, count: int, *, after: int | None, room: int = 0) -> list[int]:
        self._evict(count - self.allocator.num_free)
        return self.allocator.allocate(count, after=after, room=room)

    def _evict(self, count: int) -> None:
        """Free ``count`` cached blocks: leaves first, tails before heads, never one in use or pinned."""
        in_use: list[Node] = []
        while count > 0:
            node = self._queue.pop()
            assert node is not None, "evicting more blocks than are evictable"
            if node.children or not node.blocks:
                continue
            if not self.allocator.users(node.blocks[-1]):
                self._age = max(self._age, self._value(node))
            while count > 0 and node.blocks and not self.allocator.users(node.blocks[-1]):
                self.allocator.uncache(self._drop_last_block(node))
                count -= 1
            if node.blocks:
                if not self.pins.count(node.blocks[-1]):
                    in_use.append(node)
            elif node.parent is not None:
                self._enqueue(node.parent)
        for node in in_use:
            self._enqueue(node)

    def _drop_last_block(self, node: Node) -> int:
        self.evictions += 1
        return node.drop_last_block(self.block_size)
