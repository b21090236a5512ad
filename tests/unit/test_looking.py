"""Looking at completions: what is chosen, counted and cut, and model text that cannot act on a terminal."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

from grpo_lab.config.file import dump_yaml, load_config
from grpo_lab.errors import ConfigError, RunError
from grpo_lab.readable import Layout, body, decoder, lines, summary, visible, wrap
from grpo_lab.reading import choose, counts, of_groups, ranges, read_seen, to_json
from grpo_lab.run_dir import RunDir
from grpo_lab.types import Completion, Grade, Problem, RolloutGroup

OUTCOMES = ("correct", "wrong", "unparsable", "truncated")


def group(name: str, texts: dict[str, str], size: int = 4) -> RolloutGroup:
    """Siblings with the outcomes in turn; `texts` by outcome."""
    outcomes = [OUTCOMES[index % 4] for index in range(size)]
    completions = tuple(
        Completion((5, 6, 7)[: 1 + index % 3], (-1.0,) * (1 + index % 3), texts.get(outcome, outcome), "stop", 3, 4)
        for index, outcome in enumerate(outcomes)
    )
    grades = tuple(Grade(float(o == "correct"), o, "8" if o != "unparsable" else None) for o in outcomes)  # type: ignore[arg-type]
    return RolloutGroup(Problem(name, (), "8"), (1, 2, 3), completions, grades)


def recorded(folder: Path, overrides: tuple[str, ...] = (), steps: tuple[int, ...] = (1, 2, 4)) -> RunDir:
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_yaml(load_config(None, ["model.name=owner/model", *overrides])))
    run = RunDir.open(folder)
    for step in steps:
        groups = [group(f"p{n}", {}) for n in range(3)]
        run.save_rollouts(step, groups, {"advantage": [0.5 * n for n in range(12)]} if step > 1 else {})
    return run


def test_records_come_back_as_they_were(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    step, every = read_seen(run, None)
    assert step == 4 and len(every) == 12 and counts(every) == {**dict.fromkeys(OUTCOMES, 3), "partial": 0}
    third = every[5]
    assert (third.group, third.problem, third.sibling, third.outcome, third.advantage) == (1, "p1", 1, "wrong", 2.5)
    assert (third.tokens, third.weight_version, third.weight_version_end, third.prompt_ids) == (2, 3, 4, (1, 2, 3))
    first, plain = read_seen(run, 1)
    assert first == 1 and plain[0].advantage is None
    fresh = of_groups([group(f"p{n}", {}) for n in range(3)])
    assert fresh == plain  # what was sampled now looks as what was read


def test_few_completions_show_many_problems() -> None:
    every = of_groups([group(f"p{n}", {}, size=8) for n in range(5)])
    assert [(one.problem, one.sibling) for one in choose(every, (), None, 3)] == [("p0", 0), ("p1", 0), ("p2", 0)]
    assert [(one.problem, one.sibling) for one in choose(every, ("wrong",), None, 6)] == [
        ("p0", 1), ("p0", 5), ("p1", 1), ("p2", 1), ("p3", 1), ("p4", 1)
    ]  # fmt: skip
    assert {one.outcome for one in choose(every, ("wrong", "truncated"), "p3", 99)} == {"wrong", "truncated"}
    assert [one.sibling for one in choose(every, (), "p3", 99)] == list(range(8))
    with pytest.raises(ConfigError, match=r"unknown problem of this step 'p9'"):
        choose(every, (), "p9", 1)


def test_what_is_not_there_is_one_line(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"step 3 .* these steps have: 1-2, 4$"):
        read_seen(run, 3)
    off = recorded(tmp_path / "off", ("tracking.rollouts=false",), steps=())
    with pytest.raises(ConfigError, match=r"no rollout records: it runs with tracking\.rollouts=false"):
        read_seen(off, None)
    (tmp_path / "run/rollouts/step_000002.parquet").write_bytes(b"PAR1 torn")
    with pytest.raises(RunError, match=r"step_000002\.parquet is no rollout record"):
        read_seen(run, 2)
    assert ranges([1, 2, 3, 7, 9, 10]) == "1-3, 7, 9-10"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("one\rtwo\x08\x7f\x9b31m", r"one\x0dtwo\x08\x7f\x9b31m"),
        ("a\u202eb\u200bc\u2028d\ufeff", r"a\u202eb\u200bc\u2028d\ufeff"),
        ("\ud800 \U000e0041", r"\ud800 \U000e0041"),
        ("λ 数\n\tend", "λ 数\n\tend"),
    ],
)
def test_model_text_cannot_act_on_the_terminal(text: str, shown: str) -> None:
    assert visible(text) == shown


def test_nothing_of_a_hostile_record_reaches_the_terminal() -> None:
    evil = "\x1b[31m\r\x07\u202e"
    hostile = group(f"p{evil}", dict.fromkeys(OUTCOMES, evil * 3))
    every = of_groups([hostile])
    text = "\n".join(lines(every, every, lambda ids: evil, Layout(60)))
    assert not set(text) & set(evil.replace("[31m", "")) and text.count(r"\x1b[31m") >= 12


def test_text_is_wrapped_by_columns_and_keeps_its_blanks() -> None:
    assert wrap("  two three", 6) == ["  two", "three"]
    assert wrap("数数数数 x", 5) == ["数数", "数数", "x"]
    assert wrap("abcdefgh", 3) == ["abc", "def", "gh"] and wrap("", 5) == [""]
    text = "数 " * 40 + "x" * 100 + " end"
    assert all(cell_len(line) <= 24 for line in body(text, Layout(24, full=True)))
    joined = "".join(line[4:] for line in body(text, Layout(24, full=True)))
    assert joined.replace(" ", "") == text.replace(" ", "")


def test_long_text_is_cut_in_the_middle() -> None:
    text = "\n".join(f"line {n}" for n in range(100))
    cut = body(text, Layout(80))
    assert len(cut) == 25 and cut[0] == "  | line 0" and cut[-1] == "  | line 99"
    assert cut[16] == "  | ... 76 lines left out, --full shows them ..."
    assert len(body(text, Layout(80, full=True))) == 100
    assert len(body("\n".join("abcdefghijklmnopqrstuvwxy"), Layout(80))) == 25  # cutting one line would save none


def test_every_fact_is_said() -> None:
    every = of_groups([group("p0", {"wrong": "7 is it"}), group("p1", {})])
    assert summary(every) == (
        "8 completions of 2 problems: 2 correct, 2 wrong, 2 unparsable, 2 truncated; mean reward 0.250; 1 to 3 tokens, 1.8 on "
        "average; weights 3 to 4"
    )
    text = "\n".join(lines(every, choose(every, ("wrong", "unparsable"), "p0", 9), lambda ids: None, Layout(80)))
    assert text.startswith("\nproblem 'p0', expected '8'; 1 of 4 correct\n  | (3 prompt tokens)\n")
    assert "[1] wrong, reward 0, answer '8', 2 tokens, weights 3 to 4\n  | 7 is it" in text
    assert "[2] unparsable, reward 0, no answer found, 3 tokens" in text


def test_graded_rewards_are_counted_apart() -> None:
    (one,) = [group("p0", {})]
    half = replace(one, grades=(Grade(0.5, "partial"), *one.grades[1:]))
    every = of_groups([half])
    assert summary(every).startswith("4 completions of 1 problem: 0 correct, 1 partial, 1 wrong,")
    text = "\n".join(lines(every, choose(every, ("partial",), None, 5), lambda ids: None, Layout(80)))
    assert "0 of 4 correct, mean reward 0.125" in text and "[0] partial, reward 0.5" in text and "[1]" not in text


def test_json_is_plain_and_whole() -> None:
    every = of_groups([group("p0", {"correct": "\x1b" * 10_000})])
    chosen = choose(every, ("correct",), None, 5)
    text = json.dumps(to_json(every, chosen, ["prompt"]))
    assert "\x1b" not in text
    found = json.loads(text)
    assert found["outcomes"] == {**dict.fromkeys(OUTCOMES, 1), "partial": 0} and found["mean_reward"] == 0.25
    assert found["shown"][0]["text"] == "\x1b" * 10_000 and found["shown"][0]["prompt"] == "prompt"


def test_prompts_are_decoded_by_the_model_s_tokenizer_or_a_checkpoint_s(tmp_path: Path, demo_model: Path) -> None:
    ids = (1, 2, 3)
    local = load_config(None, [f"model.name={demo_model}"])
    remote = load_config(None, ["model.name=nobody/has-this-model"])
    text = decoder(local, [])(ids)
    assert text and text == decoder(remote, [tmp_path, demo_model])(ids)
    assert decoder(remote, [tmp_path])(ids) is None


def test_a_large_step_is_read_quickly(tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", steps=())
    run.save_rollouts(1, [group(f"p{n}", {"correct": "word " * 300}, size=32) for n in range(32)], {})
    start = time.monotonic()
    _, every = read_seen(run, None)
    assert len(every) == 1024 and len(lines(every, choose(every, (), None, 5), lambda ids: "x", Layout(80))) > 10
    assert time.monotonic() - start < 1.5
