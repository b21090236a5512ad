"""A reward of your own: how close a sentence is to the number of words that was asked for."""

from grpo_lab.types import Problem


def word_count(problem: Problem, text: str) -> float:
    """1 for exactly `words` words, less by the share that is missing or too much, 0 at least.

    `problem.data` is the row of problems.jsonl, with whatever keys it has.
    """
    assert problem.data is not None
    asked = int(problem.data["words"])
    return max(0.0, 1 - abs(len(text.split()) - asked) / asked)
