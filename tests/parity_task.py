"""A task for tests whose rewards vary even for a random model's text: 1 when the text's characters sum to an even number."""

from pathlib import Path

from grpo_lab.config import DataConfig
from grpo_lab.types import Grade, Problem


class Task:
    def __init__(self, data: DataConfig) -> None:
        problems = [Problem(f"p{n}", ({"role": "user", "content": f"{n} + {n} ="},), str(2 * n)) for n in range(40)]
        self.heldout, self.train = problems[: data.heldout_problems], problems[data.heldout_problems :]

    def grade(self, problem: Problem, text: str, truncated: bool) -> Grade:
        even = sum(map(ord, text)) % 2 == 0
        return Grade(float(even), "correct" if even else "wrong", text)

    @classmethod
    def example(cls, folder: Path) -> DataConfig:
        return DataConfig(task="parity_task", train_problems=None, heldout_problems=8)
