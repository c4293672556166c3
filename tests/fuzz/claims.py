"""What the engine says of its cache, against all that was asked of it: no more than can be, no less than must be."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING, Any, get_args

from foreword.core.explanation import CacheExplanation, Reason

from .submission import Submission, shared_length

if TYPE_CHECKING:
    from .life import Life

REASONS = get_args(Reason)


class Claims:
    """The claims of one engine, and of those that keep their KV in the same directory."""

    def __init__(self, life: Life) -> None:
        self._life = life

    def namespace(self, salt: str | None) -> Hashable:
        """Of what is on disk."""
        return (self._life.path, self._life.chosen["block_size"], salt)

    def longest(self, prompt: list[int], salt: str | None, before: int, but: Submission | None = None) -> int:
        """How many tokens of ``prompt`` may be cached when this engine has been given ``before`` requests."""
        longest, kept = self._longest_asked(prompt, salt, before, but), self._life.kept
        if kept is not None:
            longest = max(longest, kept.longest(self.namespace(salt), prompt))
            for other in list(kept.lives):
                if other is not self._life and other.claims.namespace(salt) == self.namespace(salt):
                    longest = max(longest, other.claims._longest_asked(prompt, salt, len(other.submissions), None))
        return longest

    def leave(self) -> None:
        """What was asked may be on disk from now on."""
        life = self._life
        if life.kept is not None:
            for one in life.submissions:
                life.kept.add(self.namespace(one.salt), one.prompt)
                for completion in life.expected(one).outputs:
                    life.kept.add(self.namespace(one.salt), one.prompt + completion.token_ids)
            life.kept.lives.remove(life)

    def faults(self, submission: Submission) -> Iterator[str]:
        """What is wrong with what an output says of the cache, in sentences."""
        if submission.output is None or submission.horizon is None:
            return
        cached = submission.output.usage.cached_tokens
        longest = len(submission.prompt)
        if cached and (not self._caches or not self._reads(submission)):
            yield f"{cached} tokens were reused, where nothing may be"
        prefix = submission.output.prefix
        if cached or (prefix is not None and prefix.matched_tokens):
            longest = self.longest(submission.prompt, submission.salt, submission.horizon, but=submission)
        if cached > min(longest, len(submission.prompt) - 1):
            yield f"{cached} tokens were reused, but only {longest} had been asked with salt {submission.salt}"
        if prefix is None:
            if self._caches and submission.output.usage.queue_time_s is not None:
                yield "its output does not say what it found in the cache"
            return
        yield from self.faults_of_explanation(prefix, len(submission.prompt), longest)
        yield from self._disagreement(submission, prefix, cached)

    def faults_of_explanation(self, prefix: CacheExplanation, length: int, longest: int) -> Iterator[str]:
        """What is wrong with an explanation of a prompt of ``length`` tokens, of which ``longest`` may be cached."""
        matched, is_complete = prefix.matched_tokens, prefix.reason == "complete"
        if prefix.prompt_tokens != length or not 0 <= matched <= length or prefix.reason not in REASONS:
            yield f"an impossible explanation of {length} tokens: {prefix.to_dict()}"
        if matched > longest:
            yield f"the explanation says {matched} tokens, {longest} were ever asked"
        if (matched == length) != is_complete or prefix.position != (None if is_complete else matched):
            yield f"reason {prefix.reason} at {prefix.position} with {matched} of {length} tokens"
        if not 0 <= prefix.lost_tokens <= length or not str(prefix) or not json.dumps(prefix.to_dict()):
            yield f"an explanation that nobody can read: {prefix.to_dict()}"

    def _disagreement(self, submission: Submission, prefix: CacheExplanation, cached: int) -> Iterator[str]:
        """The explanation and the usage are of the same moment."""
        if not self._reads(submission):
            return
        matched, size = min(prefix.matched_tokens, len(submission.prompt) - 1), self._life.chosen["block_size"]
        shorter = cached == matched // size * size  # memory was short of a block for the copy
        if cached != matched and not shorter:
            yield f"{cached} tokens were reused, {prefix.matched_tokens} matched, says its explanation"

    @property
    def _caches(self) -> bool:
        return bool(self._life.chosen["enable_prefix_caching"])

    @staticmethod
    def _reads(submission: Submission) -> bool:
        return "prompt_logprobs" not in submission.case.sampling

    def _longest_asked(self, prompt: list[int], salt: str | None, before: int, but: Submission | None) -> int:
        """Tokens that ``prompt`` shares with any of the first ``before`` requests of its salt, outputs included."""
        longest = 0
        for other in self._life.submissions[:before]:
            if other is but or other.salt != salt or len(other.prompt) + other.limit <= longest:
                continue
            common = shared_length(prompt, other.prompt)
            if common == len(other.prompt) < len(prompt):
                for completion in self._life.expected(other).outputs:
                    common = max(common, shared_length(prompt, other.prompt + completion.token_ids))
            longest = max(longest, common)
        return longest


def faults_of_report(report: Any, asked: int) -> Iterator[str]:
    """What is wrong with a report over at most ``asked`` requests."""
    if not 0 <= report.requests <= asked or not 0 <= report.reused_tokens <= report.prompt_tokens:
        yield f"an impossible report, of {asked} requests: {report.to_dict()}"
    saved = sum(row.tokens_saved for row in report.prefixes)
    if saved > report.reused_tokens or min((row.tokens_saved for row in report.prefixes), default=0) < 0:
        yield f"{saved} tokens saved of {report.reused_tokens} reused"
    if not str(report) or not json.dumps(report.to_dict()):
        yield "a report that nobody can read"
