"""What may happen to an engine. An operation is a function with a weight; it draws its details from its own ``rng``.

Those marked ``free_only`` wait for the engine, and need one that computes by itself.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from foreword import EngineClosedError, RequestFailedError

from .cases import INVALID
from .chats import Turn, draw_turn
from .disk import FAULTS
from .faults import PARTS, InjectedError
from .life import Life, Violation
from .submission import Submission

if TYPE_CHECKING:
    from .driver import World

SALTS = (None, None, None, None, "a", "b")
PRIORITIES = (0, 0, 0, 0, -1, 1, 5)
_ENDS = (RequestFailedError, EngineClosedError)


@dataclass
class Act:
    """One operation as it happens.

    Attributes:
        index: its number in the epoch.
        life: the engine it happens to.
        said: what it does, for a reader.
    """

    world: World
    life: Life
    index: int
    rng: random.Random
    said: list[str] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.said.append(text)

    def enter(self, count: int, *, raises_at: int | None = None) -> list[Submission]:
        """Draw requests that share a salt, and enter them in the ledger."""
        salt, entered = self.rng.choice(SALTS), []
        for member in range(count):
            case = self.world.population.draw(self.rng)
            self.say(f"{case}, salt {salt}" + ("" if raises_at is None else f", its consumer raises at {raises_at}"))
            entered.append(self.life.enter(f"{self.index}.{member}", case, salt, raises_at))
        return [one for one in entered if one is not None]

    def enter_turn(self) -> list[Submission]:
        """Draw a conversation, or the next turn of one, and enter it in the ledger."""
        earlier = [one for one in self.life.submissions if one.output is not None and isinstance(one.case, Turn)]
        salt, turn = self.rng.choice(SALTS), draw_turn(self.rng)
        if earlier and self.rng.random() < 0.6:
            last = self.rng.choice(earlier[-6:])
            answer = last.output and self.rng.choice(last.output.outputs).message
            if answer is not None and isinstance(last.case, Turn):
                salt, turn = last.salt, draw_turn(self.rng, last.case, answer.as_dict())
        self.say(f"{turn}, salt {salt}")
        entered = self.life.enter(f"{self.index}.0", turn, salt)
        return [] if entered is None else [entered]

    def submit(self, count: int, *, raises_at: int | None = None) -> list[Submission]:
        """Draw requests and hand them over together."""
        return self.hand_over(self.enter(count, raises_at=raises_at))

    def hand_over(self, entered: list[Submission]) -> list[Submission]:
        """Hand over what was entered; what was handed over in the end."""
        priority = self.rng.choice(PRIORITIES)
        try:
            handed_over = bool(entered) and self.life.submit(entered, priority)
        except EngineClosedError as error:
            self.conclude(entered, None, error)
            raise
        return entered if handed_over else []

    def pick(self) -> Submission | None:
        """One of the latest requests."""
        latest = self.life.submissions[-12:]
        return self.rng.choice(latest) if latest else None

    def conclude(self, submissions: list[Submission], outputs: Any, error: BaseException | None = None) -> None:
        """A call for these requests came back."""
        if isinstance(error, InjectedError):  # while they were prepared
            self.life.strike(submissions)
            return
        for submission, output in zip(submissions, outputs or [None] * len(submissions), strict=True):
            submission.finish(output, len(self.life.submissions), error)


Run = Callable[[Act], None]


@dataclass(frozen=True)
class Operation:
    """A row of the table; ``disk`` says whether it needs a directory, or one on a faulty disk."""

    run: Run
    weight: float
    free_only: bool
    disk: Literal["", "any", "faulty"]

    def can_happen(self, mode: str, directory: str) -> bool:
        """Whether it is for such epochs."""
        disk = not self.disk or (directory != "no" and (self.disk == "any" or "faulty" in directory))
        return disk and (mode != "stepped" or not self.free_only)


OPERATIONS: dict[str, Operation] = {}


def operation(
    weight: float, *, free_only: bool = False, disk: Literal["", "any", "faulty"] = ""
) -> Callable[[Run], Run]:
    """Enter a function in the table, under its name."""

    def enter(run: Run) -> Run:
        OPERATIONS[run.__name__] = Operation(run, weight, free_only, disk)
        return run

    return enter


# -- requests ----------------------------------------------------------------------------------------------------


@operation(14)
def submit(act: Act) -> None:
    act.submit(1)


@operation(3)
def submit_batch(act: Act) -> None:
    act.submit(act.rng.randint(2, 4))


@operation(2)
def submit_with_a_broken_consumer(act: Act) -> None:
    act.submit(1, raises_at=act.rng.choice((0, 0, 1, 2, 4)))


@operation(10)
def cancel(act: Act) -> None:
    submission = act.pick()
    quietly = act.rng.random() < 0.5
    if submission is not None:
        quietly &= submission.posted
        act.say(f"request {submission.label}{', quietly' if quietly else ''}")
        act.life.cancel(submission, quietly=quietly)


@operation(2)
def cancel_before_start(act: Act) -> None:
    for submission in act.submit(act.rng.randint(1, 2)):
        act.life.cancel(submission, quietly=act.rng.random() < 0.5)


@operation(3, free_only=True)
def generate(act: Act) -> None:
    _generate(act, act.enter(act.rng.choice((1, 1, 2, 3))))


@operation(3, free_only=True)
def generate_in_a_thread(act: Act) -> None:
    act.world.in_thread(act, _generate, act, act.enter(act.rng.choice((1, 1, 2))))


@operation(3, free_only=True)
def stream(act: Act) -> None:
    _stream(act, act.enter(1), act.rng.choice((None, 0, 1, 1, 2, 4)))


@operation(2, free_only=True)
def stream_in_a_thread(act: Act) -> None:
    act.world.in_thread(act, _stream, act, act.enter(1), act.rng.choice((None, None, 1, 3)))


@operation(3, free_only=True)
def agenerate(act: Act) -> None:
    wait_s = act.rng.choice((None, None, 0.0, 0.001, 0.004))
    act.say("to the end" if wait_s is None else f"cancelled after {wait_s} s")
    act.world.in_task(act, _agenerate(act, act.enter(act.rng.choice((1, 1, 2))), wait_s))


@operation(3, free_only=True)
def astream(act: Act) -> None:
    act.world.in_task(act, _astream(act, act.enter(1), act.rng.choice((None, None, 0, 1, 2, 4))))


@operation(5)
def submit_chat(act: Act) -> None:
    act.hand_over(act.enter_turn())


@operation(3, free_only=True)
def chat(act: Act) -> None:
    _generate(act, act.enter_turn())


@operation(2, free_only=True)
def chat_in_a_thread(act: Act) -> None:
    act.world.in_thread(act, _generate, act, act.enter_turn())


@operation(2, free_only=True)
def stream_chat(act: Act) -> None:
    _stream(act, act.enter_turn(), act.rng.choice((None, None, 1, 3)))


@operation(2, free_only=True)
def achat(act: Act) -> None:
    act.world.in_task(act, _agenerate(act, act.enter_turn(), act.rng.choice((None, None, 0.001))))


@operation(2, free_only=True)
def astream_chat(act: Act) -> None:
    act.world.in_task(act, _astream(act, act.enter_turn(), act.rng.choice((None, None, 2))))


@operation(1, free_only=True)
def many_tasks(act: Act) -> None:
    count = act.rng.randint(2, 5)
    act.say(f"{count} tasks at once")
    for _ in range(count):
        act.world.in_task(act, _astream(act, act.enter(1), None))


def _calls(act: Act, submissions: list[Submission]) -> tuple[list[Any], list[Any]]:
    priority = act.rng.choice(PRIORITIES)
    return [act.life.given(one) for one in submissions], [act.life.params(one, priority) for one in submissions]


def _generate(act: Act, submissions: list[Submission]) -> None:
    prompts, params = _calls(act, submissions)
    if not submissions:
        return
    try:
        if isinstance(turn := submissions[0].case, Turn):
            outputs = [act.life.engine.chat(turn.messages, params[0], **turn.options)]
        elif len(submissions) == 1 and act.index % 2:
            outputs = [act.life.engine.generate(prompts[0], params[0])]
        else:
            outputs = act.life.engine.generate(prompts, params)
        act.conclude(submissions, outputs)
    except (*_ENDS, InjectedError) as error:
        act.conclude(submissions, None, error)


def _stream(act: Act, submissions: list[Submission], pieces: int | None) -> None:
    act.say("to the end" if pieces is None else f"closed after {pieces} pieces")
    for submission in submissions:
        prompts, params = _calls(act, submissions)
        try:
            if isinstance(turn := submission.case, Turn):
                source = act.life.engine.stream_chat(turn.messages, params[0], **turn.options)
            else:
                source = act.life.engine.stream(prompts[0], params[0])
            submission.streams = True
            for count, chunk in enumerate(source) if pieces != 0 else ():
                submission.take(chunk, len(act.life.submissions))
                if count + 1 == pieces:
                    break
            submission.leave()
            source.close()
            act.life.check_gone(submission)
            submission.done.set()
        except (*_ENDS, InjectedError) as error:
            act.conclude(submissions, None, error)


async def _agenerate(act: Act, submissions: list[Submission], wait_s: float | None) -> None:
    prompts, params = _calls(act, submissions)
    if not submissions:
        return
    if isinstance(turn := submissions[0].case, Turn):
        task = asyncio.ensure_future(act.life.engine.achat([turn.messages], params, **turn.options))
    else:
        task = asyncio.ensure_future(act.life.engine.agenerate(prompts, params))
    try:
        if wait_s is not None:
            await asyncio.wait([task], timeout=wait_s)
            if not task.done():
                for submission in submissions:
                    submission.leave()
                task.cancel()
        act.conclude(submissions, await task)
    except asyncio.CancelledError:
        for submission in submissions:
            submission.done.set()
    except (*_ENDS, InjectedError) as error:
        act.conclude(submissions, None, error)


async def _astream(act: Act, submissions: list[Submission], pieces: int | None) -> None:
    act.say("to the end" if pieces is None else f"closed after {pieces} pieces")
    for submission in submissions:
        prompts, params = _calls(act, submissions)
        try:
            if isinstance(turn := submission.case, Turn):
                source = act.life.engine.astream_chat(turn.messages, params[0], **turn.options)
            else:
                source = act.life.engine.astream(prompts[0], params[0])
            submission.streams, count = True, 0
            while pieces is None or count < pieces:
                chunk = await anext(source, None)
                if chunk is None:
                    break
                submission.take(chunk, len(act.life.submissions))
                count += 1
            submission.leave()
            await source.aclose()
            submission.done.set()
        except (*_ENDS, InjectedError) as error:
            act.conclude(submissions, None, error)


# -- everything else -----------------------------------------------------------------------------------------------


@operation(7)
def explain(act: Act) -> None:
    case, salt = act.world.population.draw(act.rng), act.rng.choice(SALTS)
    act.say(f"{case}, salt {salt}")
    try:
        act.life.check_report(case, salt)
    except InjectedError:  # an error that waits for a tokenizer
        act.say("met an injected error")


@operation(8)
def stats(act: Act) -> None:
    act.say(str(dataclasses.replace(act.life.check_stats(), prefill_tokens_per_s=None)))  # the rest repeats


@operation(6)
def check_integrity(act: Act) -> None:
    act.life.engine.check_integrity()


@operation(1.5)
def reset_prefix_cache(act: Act) -> None:
    act.say(f"{act.life.engine.reset_prefix_cache()} blocks")
    act.life.check_stats()


@operation(8)
def invalid(act: Act) -> None:
    prompt, sampling = act.rng.choice(INVALID)
    act.say(f"{str(prompt)[:40]}, {sampling}")
    before = act.life.check_stats() if act.life.stepped else None
    engine = act.life.engine
    call = act.rng.choice((engine.generate, engine.stream, engine.explain))
    try:
        call(prompt, **sampling)
    except (ValueError, InjectedError):  # the latter waited for a tokenizer
        pass
    else:
        raise Violation(f"{str(prompt)[:40]} with {sampling} was accepted")
    if before is not None and act.life.check_stats() != before:
        raise Violation("a refused request changed the counters")


@operation(5)
def inject(act: Act) -> None:
    part, after = act.rng.choice(PARTS), act.rng.choice((0, 0, 1, 3, 8))
    act.say(f"into {part} after {after} calls")
    act.life.faults.arm(part, after)


# -- pins, explanations, the disk ------------------------------------------------------------------------------------


@operation(9)
def pin(act: Act) -> None:
    submission, ttl_s = act.pick(), act.rng.choice((None, None, 5.0, 50.0))
    if submission is not None:
        tokens = submission.prompt[: act.rng.choice((None, None, 8, 17))]
        act.say(f"{len(tokens)} of request {submission.label}: {act.life.pins.pin(submission.salt, tokens, ttl_s)}")


@operation(6)
def unpin(act: Act) -> None:
    act.say(act.life.pins.unpin(act.rng.randrange(4), unknown=act.rng.random() < 0.2))


@operation(3)
def lapse(act: Act) -> None:
    seconds = act.rng.choice((1.0, 10.0, 100.0))
    act.say(f"after {seconds} s")
    act.life.pins.lapse(seconds)


@operation(0.7)
def cache_report(act: Act) -> None:
    act.life.check_cache_report()


@operation(4, disk="any")
def flush(act: Act) -> None:
    act.life.flush()


@operation(6, disk="faulty")
def disk_fault(act: Act) -> None:
    fault, after = act.rng.choice(list(FAULTS)), act.rng.choice((0, 0, 1, 3, 10))
    act.say(f"{fault}, after {after} calls")
    act.life.directory.damaged = True
    act.world.disk.arm(fault, after)


@operation(6, disk="faulty")
def damage(act: Act) -> None:
    act.say(act.life.directory.damage(act.rng))


@operation(1.5, disk="any")
def neighbour(act: Act) -> None:
    """A second engine on the same directory, beside the first."""
    act.world.ask_neighbour(act)


@operation(0.7)
def rebuild(act: Act) -> None:
    act.world.rebuild(act.rng, act.life)
    act.say(f"closed; now {act.world.life.chosen}")
