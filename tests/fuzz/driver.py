"""Plans from seeds, epochs of operations on one engine after the other, and the smallest plan that still fails."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import shutil
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path as FilePath
from typing import Any, NamedTuple

from foreword import Engine, EngineClosedError

from .cases import Population
from .chats import save_chat_model
from .disk import FaultyOs, Kept, faulty_disk
from .life import PATIENCE_S, Life, Violation
from .operations import OPERATIONS, Act
from .options import Path, draw_options, paths
from .reference import Reference

_MEMORY = FilePath("/dev/shm")

EPOCH = 200
"""Operations of an epoch on the quickest path."""

MODES = ("stepped", "stepped", "stepped", "free", "threads")
"""How an epoch is driven: the engine's steps are operations' own, or it computes by itself while one thread drives
it, or three do."""

DIRECTORIES = ("no", "no", "no", "own", "own, faulty", "shared, faulty")
"""Where an epoch's engines keep KV on disk: nowhere, in a directory of the epoch's own, or in one that it shares with
others of its group; and whether that is on a faulty disk."""

GROUP = 16
"""Consecutive epochs that share one directory."""

DRIVERS = 3
STEPS = (0, 0, 1, 1, 2, 3, 5)  # behind an operation of a stepped epoch


class Planned(NamedTuple):
    """An operation that is to happen: its number, its name, and the seed of its details."""

    number: int
    name: str
    seed: str


@dataclass(frozen=True)
class Plan:
    """An epoch before it happens; the same for the same seed and number."""

    seed: int
    epoch: int
    mode: str
    path: Path
    directory: str
    chosen: dict[str, Any]
    operations: tuple[Planned, ...]

    @property
    def is_shared(self) -> bool:
        """Whether epochs before it have left something in its directory."""
        return self.directory.startswith("shared")


def make_plan(seed: int, epoch: int, *, most: int = EPOCH) -> Plan:
    """The plan of an epoch, of at most ``most`` operations."""
    rng = random.Random(f"{seed}/{epoch}")
    mode, path = rng.choice(MODES), rng.choice(paths())
    directory = rng.choice(DIRECTORIES)
    table = {name: row for name, row in OPERATIONS.items() if row.can_happen(mode, directory)}
    names = rng.choices(list(table), [row.weight for row in table.values()], k=EPOCH // path.cost)
    operations = [Planned(index, name, f"{seed}/{epoch}/{index}") for index, name in enumerate(names[:most])]
    return Plan(seed, epoch, mode, path, directory, draw_options(rng, path), tuple(operations))


class Failure(Exception):
    """An epoch in which something did not hold. Its text is the report.

    Attributes:
        reason: what did not hold.
    """

    def __init__(self, plan: Plan, reason: str, lines: list[str]) -> None:
        self.plan = plan
        self.reason = reason
        super().__init__(
            f"seed {plan.seed}, epoch {plan.epoch} ({plan.mode}; {plan.path}; {plan.directory} directory; "
            f"{plan.chosen}):\n{reason}\noperations:\n"
            + "\n".join(lines)
            + f"\nagain: python -m tests.fuzz --seed {plan.seed} "
            f"--epoch {plan.epoch}"
        )


class World:
    """Everything around the engines: the model, the references, an event loop, threads that call.

    Args:
        model: directory of the model.

    Attributes:
        spoil: called with each engine that is fuzzed before anything is asked of it, for tests of the fuzzer.
    """

    def __init__(self, model: FilePath) -> None:
        self.spoil: Callable[[Engine], None] = lambda _: None
        self.population = Population(0)
        self.life: Life
        self.lives = 0
        self.totals: Counter[str] = Counter()
        self._root = FilePath(
            tempfile.mkdtemp(dir=_MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else None)
        )
        self._model = str(save_chat_model(model, self._root / "model"))
        self.reference = Reference(self._model)
        self.disk: FaultyOs
        self._kept: Kept | None = None
        self._shared: tuple[tuple[int, int], Kept] | None = None
        self._neighbour: Life | None = None
        self._plan: Plan
        self._lock = threading.Lock()
        self._pending: list[Future[Any]] = []
        self._pool = ThreadPoolExecutor(4, "fuzz-caller")
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="fuzz-loop")
        self._loop_thread.start()

    def close(self) -> None:
        self._pool.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join()
        self._loop.close()
        self.reference.close()
        shutil.rmtree(self._root)

    def in_thread(self, act: Act, function: Callable[..., None], *args: Any) -> None:
        """Call ``function`` on a thread of its own."""
        act.say("in a thread")
        self._pending.append(self._pool.submit(function, *args))

    def in_task(self, act: Act, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run ``coroutine`` as a task of the event loop."""
        act.say("in a task")
        self._pending.append(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def rebuild(self, rng: random.Random, life: Life) -> None:
        """Close the engine, whatever runs, and build another one. Nothing if somebody else just did."""
        with self._lock:
            if life is self.life:
                self._end_life()
                self._begin_life(draw_options(rng, self._plan.path))

    def ask_neighbour(self, act: Act) -> None:
        """Have another engine on the same directory compute something; open it if there is none."""
        with self._lock:
            if act.life is not self.life or act.life.closing:
                return
            if self._neighbour is None:
                chosen = {**draw_options(act.rng, self._plan.path), "block_size": act.life.chosen["block_size"]}
                act.say(f"opened: {chosen}")
                self._neighbour = Life(
                    self._model, self._plan.path, chosen, self.reference, stepped=False, kept=act.life.kept
                )
                self.spoil(self._neighbour.engine)
            act.life.directory.damaged = True  # it may evict what the other has just found
            asked = Act(self, self._neighbour, act.index, act.rng, act.said)
            asked.hand_over(asked.enter(act.rng.randint(1, 3)))
            self._neighbour.wait()
            self._neighbour.flush()

    # -- an epoch ----------------------------------------------------------------------------------------------

    def run(self, plan: Plan) -> None:
        """Let a plan happen, and check everything.

        Raises:
            Failure: something did not hold.
        """
        if self.population.seed != plan.seed:
            self.population = Population(plan.seed)
        self.reference.start(self.population)
        self._plan = plan
        lines: dict[int, str] = {}
        problems: list[str] = []
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            self.disk = stack.enter_context(faulty_disk())
            self._kept = self._directory(stack)
            self._begin_life(plan.chosen)
            try:
                self._drive(lines, problems)
                self._finish(problems)
            finally:
                for life in (self._neighbour, self.life):
                    if life is not None and not life.stuck:
                        life.engine.close()
                self._neighbour = None
                self.totals["disk errors raised"] += self.disk.raised
                if problems and plan.is_shared:  # nobody knows any more what is in the directory
                    self._shared = None
        if problems:
            raise Failure(plan, "\n".join(problems), [lines[index] for index in sorted(lines)])

    def run_again(self, plan: Plan) -> None:
        """As :meth:`run`, behind the epochs before it that share its directory."""
        self._shared = None
        for epoch in range(plan.epoch - plan.epoch % GROUP, plan.epoch) if plan.is_shared else ():
            earlier = make_plan(plan.seed, epoch)
            if earlier.is_shared:
                self.run(earlier)
        self.run(plan)

    def _directory(self, stack: ExitStack) -> Kept | None:
        """Where this epoch's engines keep KV."""
        plan = self._plan
        faulty, group = "faulty" in plan.directory, (plan.seed, plan.epoch // GROUP)
        if plan.directory.startswith("own"):
            directory = FilePath(stack.enter_context(tempfile.TemporaryDirectory(dir=self._root)))
            return Kept(directory / "kv", faulty=faulty)
        if not plan.is_shared:
            return None
        if self._shared is None or self._shared[0] != group:
            shutil.rmtree(self._root / "shared", ignore_errors=True)
            self._shared = (group, Kept(self._root / "shared", faulty=faulty))
        return self._shared[1]

    def _drive(self, lines: dict[int, str], problems: list[str]) -> None:
        operations = self._plan.operations
        if self._plan.mode != "threads":
            self._drive_some(operations, lines, problems)
            return
        threads = [
            threading.Thread(target=self._drive_some, args=(operations[part::DRIVERS], lines, problems))
            for part in range(DRIVERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _drive_some(self, operations: tuple[Planned, ...], lines: dict[int, str], problems: list[str]) -> None:
        for planned in operations:
            if problems:
                return
            act = Act(self, self.life, planned.number, random.Random(planned.seed))
            try:
                OPERATIONS[planned.name].run(act)
                if act.life.stepped and not act.life.closing:
                    steps = act.rng.choice(STEPS)
                    act.say(f"{steps} steps")
                    act.life.step(steps)
            except EngineClosedError as error:
                if not act.life.closing:
                    problems.append(f"operation {planned.number}: {error!r}, from {error.__cause__!r}")
            except BaseException as error:
                problems.append(f"operation {planned.number}: {_described(error)}")
            lines[planned.number] = f"  {planned.number}. {planned.name}: {'; '.join(act.said)}"

    def _finish(self, problems: list[str]) -> None:
        """Wait for everybody, then check that all is well and nothing is left."""
        try:
            if self.life.stepped and not self.life.closing:
                self.life.set_free()
            for future in self._pending:
                future.result(PATIENCE_S)
            self.disk.disarm()
            if not problems:
                self.life.drain(random.Random(self._plan.epoch))
            self._end_life()
        except BaseException as error:
            problems.append(_described(error))
        self._pending.clear()

    def _begin_life(self, chosen: dict[str, Any]) -> None:
        stepped = self._plan.mode == "stepped"
        self.life = Life(self._model, self._plan.path, chosen, self.reference, stepped=stepped, kept=self._kept)
        self.spoil(self.life.engine)
        self.lives += 1

    def _end_life(self) -> None:
        if self._neighbour is not None:
            self._neighbour.check_idle()
            self._neighbour.check_outcomes()
            self._neighbour.close(alone=False)
            self.totals.update(self._neighbour.summary())
            self._neighbour = None
        self.life.close()
        self.totals.update(self.life.summary())


@dataclass
class Summary:
    """What a run did."""

    operations: int = 0
    epochs: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    names: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)


def fuzz(
    world: World, seed: int, operations: int, *, on_epoch: Callable[[Summary, Plan], None] | None = None,
    most_failures: int = 1,
) -> Summary:  # fmt: skip
    """Run epochs of ``seed`` until so many operations have happened, or until ``most_failures`` epochs have failed."""
    summary, started, cpu_started = Summary(), time.monotonic(), time.process_time()
    while summary.operations < operations and len(summary.failures) < most_failures:
        plan = make_plan(seed, summary.epochs, most=operations - summary.operations)
        try:
            world.run(plan)
        except Failure as failure:
            summary.failures.append(failure)
        summary.epochs += 1
        summary.operations += len(plan.operations)
        summary.names.update(planned.name for planned in plan.operations)
        summary.modes[plan.mode] += 1
        summary.seconds, summary.cpu_seconds = time.monotonic() - started, time.process_time() - cpu_started
        if on_epoch is not None:
            on_epoch(summary, plan)
    return summary


def shrink(world: World, failure: Failure, seconds: float) -> Failure:
    """Leave out operations while the epoch still fails (ddmin of Zeller and Hildebrandt, 2002, complements only)."""
    deadline, best, parts = time.monotonic() + seconds, failure, 2
    while len(best.plan.operations) > 1 and time.monotonic() < deadline:
        kept = best.plan.operations
        size = -(-len(kept) // parts)
        for start in range(0, len(kept), size):
            smaller = _fails(world, replace(best.plan, operations=kept[:start] + kept[start + size :]))
            if smaller is not None or time.monotonic() > deadline:
                break
        if smaller is not None:
            best, parts = smaller, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(parts * 2, len(kept))
    return best


def _fails(world: World, plan: Plan) -> Failure | None:
    for _ in range(1 if plan.mode == "stepped" else 3):  # elsewhere the interleaving differs from run to run
        try:
            world.run_again(plan)
        except Failure as failure:
            return failure
    return None


def resident_bytes() -> int:
    """Memory of this process, garbage collected first."""
    gc.collect()
    pages = int(FilePath("/proc/self/statm").read_text().split()[1])
    return pages * 4096


@contextmanager
def _quiet() -> Iterator[None]:
    """Injected errors are logged by the hundred."""
    logger = logging.getLogger("foreword")
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        logger.setLevel(level)


def _described(error: BaseException) -> str:
    if isinstance(error, Violation):
        return str(error)
    return "".join(traceback.format_exception(error, limit=-6))
