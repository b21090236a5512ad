"""What a user's wrong data and options are answered with, and what right ones become."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from grpo_lab.config import DataConfig
from grpo_lab.errors import ConfigError
from grpo_lab.tasks import TaskProtocol, load_task

GSM8K_ROWS = [{"question": f"What is {n} + 1?", "answer": f"It is {n + 1}.\n#### {n + 1}"} for n in range(6)]
JSONL_ROWS = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(6)]
SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def _write(folder: Path, rows: Sequence[Any]) -> Path:
    file = folder / "train.jsonl"
    file.write_text(
        "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), encoding="utf-8"
    )
    return file


def _load(task: str, path: Path | None, **options: Any) -> TaskProtocol:
    return load_task(
        DataConfig(
            task=task, path=str(path) if path else None, train_problems=None, heldout_problems=2, options=options
        )
    )


def _refusal(task: str, path: Path | None, **options: Any) -> str:
    with pytest.raises(ConfigError) as error:
        _load(task, path, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


# gsm8k


def test_gsm8k_takes_a_file_or_its_folder_and_asks_for_the_declared_answer(tmp_path: Path) -> None:
    file = _write(tmp_path, GSM8K_ROWS)
    by_file, by_folder = _load("gsm8k", file), _load("gsm8k", tmp_path, system="Be brief.")
    assert [p.id for p in by_file.train] == [p.id for p in by_folder.train]
    assert {p.id: p.answer for p in (*by_file.train, *by_file.heldout)} == {f"gsm8k-{n}": str(n + 1) for n in range(6)}
    (user,) = by_file.train[0].messages
    assert user["role"] == "user"
    assert user["content"].startswith("What is ")
    assert "#### <number>" in user["content"]
    assert [m["role"] for m in by_folder.train[0].messages] == ["system", "user"]


def test_gsm8k_grading_and_instruction_are_options(tmp_path: Path) -> None:
    file = _write(tmp_path, GSM8K_ROWS)
    strict, flexible = _load("gsm8k", file), _load("gsm8k", file, grading="flexible", instruction="")
    problem = flexible.train[0]
    assert strict.grade(problem, f"it is {problem.answer}", False).outcome == "unparsable"
    assert flexible.grade(problem, f"it is {problem.answer}", False).outcome == "correct"
    assert problem.messages[0]["content"] in {row["question"] for row in GSM8K_ROWS}


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path: Path) -> None:
    file = _write(tmp_path, ["\ufeff" + json.dumps(GSM8K_ROWS[0]), "", *GSM8K_ROWS[1:], "  "])
    task = _load("gsm8k", file)
    assert len(task.train) + len(task.heldout) == 6


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ("{not json", ["not valid JSON", "one JSON object"]),
        ("[1, 2]", ["a list where a JSON object is expected"]),
        ("[" * 100_000, ["not valid JSON"]),
        ({"question": "q"}, ["no key 'answer'", "'question'"]),
        ({"answer": "#### 1"}, ["no key 'question'"]),
        ({"question": ["q"], "answer": "#### 1"}, ["'question' must be a non-empty string", "['q']"]),
        ({"question": " ", "answer": "#### 1"}, ["'question' must be a non-empty string"]),
        ({"question": "q", "answer": "1"}, ["must end in '#### <number>'"]),
        ({"question": "q", "answer": "#### one"}, ["' one' is not a number"]),
    ],
)
def test_a_bad_gsm8k_row_is_named_by_file_and_line(tmp_path: Path, bad: Any, parts: list[str]) -> None:
    file = _write(tmp_path, [*GSM8K_ROWS[:2], bad, *GSM8K_ROWS[2:]])
    refusal = _refusal("gsm8k", file)
    for part in (f"{file}, line 3", *parts):
        assert part in refusal


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path: Path) -> None:
    assert "no file" in _refusal("gsm8k", tmp_path)
    assert str(tmp_path / "none.jsonl") in _refusal("jsonl", tmp_path / "none.jsonl")
    (tmp_path / "train.jsonl").write_bytes(b"\xff\xfe\x00")
    assert "not UTF-8" in _refusal("gsm8k", tmp_path)


def test_without_the_hub_gsm8k_says_so_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: the hub libraries read their offline switch and cache folder at import."""
    program = (
        "from grpo_lab.config import DataConfig\nfrom grpo_lab.errors import ConfigError\n"
        "from grpo_lab.tasks import load_task\n"
        "try:\n    load_task(DataConfig())\nexcept ConfigError as error:\n    print(error)"
    )
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120)
    (line,) = done.stdout.splitlines()
    assert "'openai/gsm8k' could not be loaded from the hub" in line
    assert "set data.path" in line


# options, of every task


@pytest.mark.parametrize("task", ["gsm8k", "jsonl", "reasoning_gym"])
def test_an_unknown_option_is_refused_with_the_near_one(task: str) -> None:
    refusal = _refusal(task, None, gradin="strict")
    assert "unknown key 'data.options.gradin'" in refusal
    assert "did you mean 'data.options.grading'" in refusal


@pytest.mark.parametrize("task", ["gsm8k", "jsonl", "reasoning_gym"])
def test_a_wrong_option_value_is_refused_with_the_allowed_ones(task: str) -> None:
    refusal = _refusal(task, None, grading="lenient")
    assert "data.options.grading='lenient'" in refusal
    assert "'strict'" in refusal


# reasoning_gym


def test_reasoning_gym_merges_equal_questions_and_scores_by_three_protocols() -> None:
    by = {grading: _load("reasoning_gym", None, params=SUMS, pool=1500, grading=grading) for grading in PROTOCOLS}
    problem = by["native"].train[0]
    assert [len(task.train) + len(task.heldout) for task in by.values()] == [200, 200, 200]  # 10 x 10 digits, + and -
    assert problem.messages == by["strict"].train[0].messages
    answer = problem.answer
    texts = {"strict": f"#### {answer}", "flexible": f"so {answer}.", "native": f"1 or 2? <answer> {answer} </answer>"}
    for grading, text in texts.items():
        assert by[grading].grade(problem, text, False).outcome == "correct"
        assert by[grading].grade(problem, text, True).outcome == "truncated"


PROTOCOLS = ["strict", "flexible", "native"]


def test_native_grading_reads_the_last_answer_tag_or_the_whole_text() -> None:
    task = _load("reasoning_gym", None, params=SUMS, pool=500, grading="native")
    problem = task.train[0]
    wrong = str(int(problem.answer) + 1)
    for text in (problem.answer, f" {problem.answer}\n", f"<answer>{wrong}</answer><answer>{problem.answer}</answer>"):
        assert task.grade(problem, text, False).reward == 1.0, text
    for text in (wrong, f"<answer>{problem.answer}</answer><answer>{wrong}</answer>", f"it is {problem.answer}"):
        assert task.grade(problem, text, False).outcome == "wrong", text
    for text in ("", "<answer></answer>", "1" * 20_000):
        assert task.grade(problem, text, False).outcome == "unparsable", text[:20]


def test_a_text_answer_needs_native_grading() -> None:
    params = {"min_words": 2, "max_words": 3}
    assert "is not a number" in _refusal("reasoning_gym", None, generator="word_sorting", params=params, pool=10)
    task = _load("reasoning_gym", None, generator="word_sorting", params=params, pool=10, grading="native")
    assert task.grade(task.train[0], task.train[0].answer, False).outcome == "correct"


def test_a_scorer_that_evaluates_text_is_refused_unless_allowed() -> None:
    assert "allow_eval=true" in _refusal("reasoning_gym", None, generator="countdown", pool=10, grading="native")
    task = _load("reasoning_gym", None, generator="countdown", pool=10, grading="native", allow_eval=True)
    assert len(task.train) == 8


def test_a_wrong_generator_or_parameter_is_refused() -> None:
    assert "did you mean 'chain_sum'" in _refusal("reasoning_gym", None, generator="chain_summ")
    refusal = _refusal("reasoning_gym", None, params={"min_term": 2})
    assert "unknown chain_sum parameter 'min_term': did you mean 'min_terms'" in refusal
    assert "unknown chain_sum parameter 'size'" in _refusal("reasoning_gym", None, params={"size": 3})
    assert "min_terms must be positive" in _refusal("reasoning_gym", None, params={"min_terms": 0})
    assert "reads no file" in _refusal("reasoning_gym", Path("x"))


def test_without_the_package_the_install_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "reasoning_gym"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    assert "pip install reasoning-gym" in _refusal("reasoning_gym", None)


# jsonl


def test_jsonl_keeps_ids_and_conversations_and_adds_the_options(tmp_path: Path) -> None:
    talk = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "1 + 1?"},
    ]
    rows = [{"prompt": talk, "answer": "2", "id": "talk", "level": 5}, *JSONL_ROWS]
    task = _load("jsonl", _write(tmp_path, rows), instruction="Be exact.", system="You add.")
    by_id = {p.id: p for p in (*task.train, *task.heldout)}
    assert set(by_id) == {"talk", *(f"row-{n}" for n in range(1, 7))}
    expected = [
        {"role": "system", "content": "You add."},
        *talk[:2],
        {"role": "user", "content": "1 + 1?\n\nBe exact."},
    ]
    assert list(by_id["talk"].messages) == expected
    assert by_id["talk"].data is not None
    assert by_id["talk"].data["level"] == 5
    assert by_id["row-1"].messages[1]["content"] == "What is 0 + 1?\n\nBe exact."


def test_jsonl_exact_grading_compares_stripped_strings(tmp_path: Path) -> None:
    rows = [{"prompt": f"Opposite of {n}?", "answer": f" north {n}\n"} for n in range(4)]
    task = _load("jsonl", _write(tmp_path, rows), grading="exact")
    problem = task.train[0]
    assert task.grade(problem, f"\n\n{problem.answer}", False).reward == 1.0
    assert task.grade(problem, problem.answer.upper(), False).outcome == "wrong"
    assert task.grade(problem, "  ", False).outcome == "unparsable"
    assert task.grade(problem, problem.answer, True).outcome == "truncated"


REWARDS = """
def by_length(problem, text):
    return min(len(text), problem.data["limit"]) / 4 - 1

def broken(problem, text):
    return "much"

constant = 3
"""


def test_a_reward_function_of_the_user_replaces_grading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_rewards_for_test.py").write_text(REWARDS, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    rows = [{"prompt": f"Write {n}", "answer": "anything", "limit": 8} for n in range(4)]
    file = _write(tmp_path, rows)
    task = _load("jsonl", file, reward="user_rewards_for_test:by_length", truncated_reward=-1)
    problem = task.train[0]
    graded = [task.grade(problem, text, False) for text in ("", "12", "12345", "123456789")]
    assert [(g.reward, g.outcome) for g in graded] == [
        (-1.0, "wrong"), (-0.5, "wrong"), (0.25, "partial"), (1.0, "correct")
    ]  # fmt: skip
    assert task.grade(problem, "123456789", True).reward == -1.0
    assert "being cut off pays" in _refusal("jsonl", file, reward="user_rewards_for_test:by_length")
    assert _load("jsonl", file, reward="user_rewards_for_test:by_length", truncated_reward=0.0), "it was asked for"
    unanswered = _write(tmp_path, [{"prompt": f"Say {n}", "limit": 8} for n in range(4)])
    free = _load("jsonl", unanswered, reward="user_rewards_for_test:by_length", truncated_reward=-1)
    assert {problem.answer for problem in free.train} == {""}
    file = _write(tmp_path, rows)
    assert "'much' for problem 'row-" in _refusal("jsonl", file, reward="user_rewards_for_test:broken")
    assert "is a int" in _refusal("jsonl", file, reward="user_rewards_for_test:constant")
    assert "defines no 'missing'" in _refusal("jsonl", file, reward="user_rewards_for_test:missing")
    assert "PYTHONPATH" in _refusal("jsonl", file, reward="no_such_module_at_all:f")
    assert "data.options.reward='by_length'" in _refusal("jsonl", file, reward="by_length")


@pytest.mark.parametrize(
    ("bad", "parts"),
    [
        ({"answer": "1"}, ["no key 'prompt'"]),
        ({"prompt": "q"}, ["no key 'answer'"]),
        ({"prompt": "q", "answer": [1]}, ["'answer' must be a non-empty string, got [1]"]),
        ({"prompt": "q", "answer": "one"}, ["'one' is not a number"]),
        ({"prompt": "q", "answer": "1", "id": [7]}, ["'id' must be a non-empty string"]),
        ({"prompt": "q", "answer": "1", "id": "row-0"}, ["id 'row-0' stands at", "line 1"]),
        ({"prompt": [], "answer": "1"}, ["end with the user's turn"]),
        ({"prompt": ["q"], "answer": "1"}, ["'prompt' list must hold"]),
        ({"prompt": [{"role": "robot", "content": "q"}], "answer": "1"}, ["system|user|assistant"]),
        ({"prompt": [{"role": "assistant", "content": "q"}], "answer": "1"}, ["end with the user's turn"]),
    ],
)
def test_a_bad_jsonl_row_is_named_by_file_and_line(tmp_path: Path, bad: dict[str, Any], parts: list[str]) -> None:
    file = _write(tmp_path, [*JSONL_ROWS[:2], bad, *JSONL_ROWS[2:]])
    refusal = _refusal("jsonl", file)
    for part in (f"{file}, line 3", *parts):
        assert part in refusal


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    file = _write(tmp_path, [{"prompt": prompt, "answer": "1"}, *JSONL_ROWS])
    assert "drop one" in _refusal("jsonl", file, system="t")


def test_jsonl_needs_a_path() -> None:
    assert "needs data.path" in _refusal("jsonl", None)


def test_answers_may_be_numbers(tmp_path: Path) -> None:
    """3 and 0.5 stand for "3" and "0.5"; true stands for nothing."""
    file = tmp_path / "train.jsonl"
    rows = [{"prompt": f"q{n}", "answer": value} for n, value in enumerate([3, 0.5, "7", -2])]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = load_task(DataConfig(task="jsonl", path=str(file), train_problems=None, heldout_problems=1))
    assert sorted(p.answer for p in [*task.train, *task.heldout]) == ["-2", "0.5", "3", "7"]


def test_a_reward_above_the_greatest_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "generous_rewards.py").write_text("def pay(problem, text): return 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    file = tmp_path / "train.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"q{n}", "answer": "1"}) + "\n" for n in range(4)))
    options = {"reward": "generous_rewards:pay"}
    data = DataConfig(task="jsonl", path=str(file), train_problems=None, heldout_problems=1, options=options)
    with pytest.raises(ConfigError, match="largest_reward=1"):
        load_task(data)
    allowed = load_task(data.model_copy(update={"options": {**options, "largest_reward": 2.0}}))
    assert allowed.grade(allowed.train[0], "1", False).reward == 2.0
