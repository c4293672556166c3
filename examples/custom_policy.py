"""Your own scheduling policy: a class with one method. Here, interactive requests go before batch work.

A policy sees, for every request that wants prefill, its arrival number, priority, length, cached tokens, waiting time
and how often it was overtaken, and returns a sort key: the smallest goes first.
"""

from typing import Any

from foreword import Candidate, Engine, SamplingParams


class InteractiveFirst:
    """Priority 0 is interactive and goes first, cheapest prompt first; batch work follows in order of arrival.

    Batch work that was overtaken eight times goes before everything, so that it cannot starve.
    """

    def key(self, candidate: Candidate) -> Any:
        if candidate.overtaken >= 8:
            return (0, candidate.number)
        if candidate.priority == 0:
            return (1, candidate.remaining_tokens)
        return (2, candidate.number)


def main() -> None:
    report = "The committee met and discussed the budget in great detail. " * 24
    prompts = [f"Report {number}: {report}" for number in range(4)] + ["The capital of France is"]
    batch = [SamplingParams(temperature=0, max_tokens=8, priority=1)] * 4
    interactive = [SamplingParams(temperature=0, max_tokens=8, priority=0)]
    with Engine("smollm2-135m", scheduling_policy=InteractiveFirst) as engine:
        for output in engine.generate(prompts, batch + interactive):
            usage = output.usage
            kind = "interactive" if usage.prompt_tokens < 100 else "batch"
            print(f"{kind:12}{usage.prompt_tokens:5} tokens, first token after {usage.time_to_first_token_s:5.2f} s")


if __name__ == "__main__":
    main()
