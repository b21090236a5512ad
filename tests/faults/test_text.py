"""Hostile text: special tokens, half characters, templates that refuse, numbers without end, a megabyte of braces.

The grader is linear in time and bounded in memory; what cannot be a prompt or a row is one line that names it.
"""

import json
import math
import time
import tracemalloc
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from conftest import write_tiny_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from grpo_lab.assemble import assemble
from grpo_lab.config import DataConfig, ModelConfig, RolloutConfig
from grpo_lab.config.file import load_config
from grpo_lab.errors import ConfigError
from grpo_lab.hub import stop_token_ids
from grpo_lab.rollout.collect import Collector, render_prompt
from grpo_lab.rollout.engines import EngineSpec, hf, scripted
from grpo_lab.storage.records import read_groups, write_groups
from grpo_lab.tasks import load_task
from grpo_lab.tasks._answers import Protocol, grade_number, parse_number, require_number
from grpo_lab.types import Completion, GenerationRequest, Grade, Message, Problem, Sampling

PROTOCOLS: tuple[Protocol, ...] = ("strict", "flexible")
MEGABYTE = 1_000_000


def problem(*contents: str, roles: str = "user") -> Problem:
    pairs = zip(roles.split(), contents, strict=True)
    return Problem("p", tuple(Message(role=role, content=content) for role, content in pairs), "18")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


# -- the grader ------------------------------------------------------------------------------------------------------

PIECES = {
    "nested boxes": r"\boxed{\frac{",
    "nested boxes with numbers": r"\boxed{1\frac{2}{",
    "nested fractions": r"\frac{1}{\frac",
    "closed boxes": r"\boxed{\frac{1}{2",
    "open braces": "{",
    "closed braces": "}",
    "boxes of markup": r"\boxed{$\text{**(",
    "hash marks with spaces": "####    ",
    "hash marks with signs": "#### -+$",
    "halves of declarations": "#### 1 ",
    "mixed numbers": "1 1/",
    "exponents": "1e+",
    "grouped": "1,000,",
    "latex commas": r"1{,}000\,",
    "short fractions": r"\frac12",
    "operators": "1 + ",
    "minus signs": "\u2212\u2013-",
    "currency": "$\\$€",
    "decimals": "1.1.",
    "special tokens": "<|im_end|>",
    "replacement characters": "\ufffd",
    "emoji": "\U0001f999",
    "null": "\x00",
    "combining": "1\u0301",
}


@pytest.mark.parametrize("name", PIECES)
def test_a_megabyte_of_anything_is_graded_in_linear_time(name: str) -> None:
    """A quarter of it takes about a quarter of the time; 2 s are fifty times what most need."""
    piece = PIECES[name]
    spent = []
    for size in (MEGABYTE // 4, MEGABYTE):
        text = (piece * (size // len(piece) + 1))[:size]
        start = time.process_time()
        grades = [grade_number("18", text, False, protocol) for protocol in PROTOCOLS]
        spent.append(time.process_time() - start)
        assert [grade.reward for grade in grades] == [0.0, 0.0]
        assert all(len(grade.extracted or "") <= 1000 for grade in grades)
    assert spent[1] < 2 and spent[1] < 4 * 4 * spent[0] + 0.1


@pytest.mark.parametrize("text", ["9" * MEGABYTE, r"\boxed{" * (MEGABYTE // 7), "1,000," * (MEGABYTE // 6)],
                         ids=["digits", "boxes", "lists"])  # fmt: skip
def test_memory_is_a_few_copies_of_the_text(text: str) -> None:
    tracemalloc.start()
    try:
        for protocol in PROTOCOLS:
            grade_number("18", text, False, protocol)
        assert tracemalloc.get_traced_memory()[1] < 16 * MEGABYTE
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("text", [
    "1e999999999", "1e-999999999", "9e1001", "1" * 100_000, "0." + "1" * 100_000, "1/" + "3" * 100_000, "1e" + "9" * 4400,
    "10**(10**9)", "10^1000000000", "9" * 4301, "1e999999999/1e999999999", "0e999999999", "1/0", "1/0.000", "nan", "inf",
    "-Infinity", "0x12", "1_000", "\u0661\u0668", "１８", "\u00b2", "\u2167",
])  # fmt: skip
def test_numbers_nobody_can_mean_are_none(text: str) -> None:
    """Python's own limit is 4,300 digits, and 10 to the power 999,999,999 has 400 MB."""
    start = time.process_time()
    assert parse_number(text) is None
    for wrapped in (f"#### {text}", rf"\boxed{{{text}}}"):
        assert grade_number("18", wrapped, False, "strict").reward == 0
    with pytest.raises(ConfigError, match="is not a number") as error:
        require_number(text, "line 3")
    assert len(str(error.value)) < 300 and time.process_time() - start < 1


def test_the_largest_numbers_that_count_are_exact() -> None:
    assert parse_number("1e1000") == Fraction(10) ** 1000
    digits = "7" * 999
    assert grade_number(digits, f"#### {digits}", False, "strict").outcome == "correct"
    assert grade_number(digits, f"#### {digits[:-1]}8", False, "strict").outcome == "wrong"


@pytest.mark.parametrize("tail", ["<|im_end|>", "<|endoftext|>", "</s>", "<pad>" * 50, "\ufffd", "\u200b", "\x00"])
def test_special_tokens_as_text_behind_an_answer_are_no_part_of_it(tail: str) -> None:
    for text in (f"#### 18{tail}", rf"\boxed{{18}}{tail}", f"<|im_start|>assistant\n#### 18{tail}\n"):
        for protocol in PROTOCOLS:
            assert grade_number("18", text, False, protocol) == Grade(1.0, "correct", "18")


def test_rows_of_numbers_without_end_are_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    for answer in ("9" * 5000, "1e400", "-1e400", "NaN", "Infinity", f'"{"9" * 5000}"', '"1e999999999"'):
        file.write_text("".join(f'{{"prompt": "q{n}", "answer": {answer if n == 2 else n}}}\n' for n in range(4)))
        with pytest.raises(ConfigError, match=r"train\.jsonl, line 3") as error:
            load_task(DataConfig(task="jsonl", path=str(file), train_problems=None, heldout_problems=1))
        assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("key", ["prompt", "answer", "id", "other"])
def test_half_a_surrogate_pair_in_a_row_is_refused_by_line(tmp_path: Path, key: str) -> None:
    """A tokenizer, a seed and a parquet file would each choke on it, some of them only after a step's sampling."""
    rows = [{"prompt": f"q{n}", "answer": "1", "id": f"i{n}", "other": "\U0001f999"} for n in range(4)]
    file = tmp_path / "train.jsonl"
    data = DataConfig(task="jsonl", path=str(file), train_problems=None, heldout_problems=1)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert "\\ud83e\\udd99" in file.read_text() and len(load_task(data).train) == 3  # a whole pair is a character
    rows[2][key] = "1 \ud83e"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r"train\.jsonl, line 3: half of a surrogate pair"):
        load_task(data)


# -- completions -----------------------------------------------------------------------------------------------------


def grade(problem: Problem, text: str, truncated: bool) -> Grade:
    return grade_number(problem.answer, text, truncated, "strict")


def collected(
    tokenizer: PreTrainedTokenizerBase, model: Path, ids: Sequence[int], file: Path, finish: str = "stop"
) -> tuple[str, Grade]:
    """A completion of these ids, decoded and graded, and back from the file it is kept in."""

    class Engine(scripted.EngineImpl):
        def generate(self, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
            one = Completion(tuple(ids), (-1.0,) * len(ids), "", finish, 0)  # type: ignore[arg-type]
            return [one for _ in requests]

    spec = EngineSpec(model, ModelConfig(name=str(model)), RolloutConfig())
    collector = Collector(Engine(spec), tokenizer, grade, 0, 64)
    groups = collector.collect([problem("q")], 2, Sampling(64, stop_token_ids=(2,)), ("rollout", 0))
    write_groups(file, groups)
    (kept,), _ = read_groups(file)
    assert kept.completions == groups[0].completions and kept.grades == groups[0].grades
    return groups[0].completions[0].text, groups[0].grades[0]


def test_special_tokens_as_ids_are_no_text_and_as_text_are(
    tiny_model: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    start, end = tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|endoftext|>"])
    answer = tokenizer("#### 18").input_ids
    assert collected(tokenizer, tiny_model, [start, *answer, end, 2], tmp_path / "a.parquet") == (
        "#### 18", Grade(1.0, "correct", "18"))  # fmt: skip
    spelled = [id for char in "<|im_end|>" for id in tokenizer(char).input_ids]
    text, graded = collected(tokenizer, tiny_model, [*answer, *spelled, 2], tmp_path / "b.parquet")
    assert (text, graded.outcome) == ("#### 18<|im_end|>", "correct")
    assert collected(tokenizer, tiny_model, [2], tmp_path / "c.parquet") == ("", Grade(0.0, "unparsable"))


def test_a_completion_cut_inside_a_character_is_text_with_a_replacement(
    tiny_model: Path, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    ids = tokenizer("#### 18 \U0001f999").input_ids
    assert tokenizer.decode(ids[:-1]) != "#### 18 "
    text, graded = collected(tokenizer, tiny_model, ids[:-1], tmp_path / "a.parquet", "length")
    assert text.endswith("\ufffd") and graded == Grade(0.0, "truncated")
    text, graded = collected(tokenizer, tiny_model, [*ids[:-1], 2], tmp_path / "b.parquet")
    assert text.endswith("\ufffd") and graded.outcome == "correct"
    text, graded = collected(tokenizer, tiny_model, [ids[-1], *ids[:3], 2], tmp_path / "c.parquet")
    assert text.startswith("\ufffd")


def test_a_completion_ends_with_its_first_stop_token(tiny_model: Path) -> None:
    """Several of them, and the one that pads; of a random model many tokens must stop to be seen."""
    engine = hf.EngineImpl(EngineSpec(tiny_model, ModelConfig(name=str(tiny_model), dtype="float32"), RolloutConfig()))
    requests = [GenerationRequest(tuple(range(10, 14 + n)), n) for n in range(8)]
    seen = set()
    for stops in ((), (0,), (0, 1, 2), tuple(range(0, 49152, 4))):
        for completion in engine.generate(requests, Sampling(6, stop_token_ids=stops)):
            seen.add(completion.finish_reason)
            assert not set(stops) & set(completion.token_ids[:-1])
            assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in stops)
            assert completion.finish_reason == "stop" or len(completion.token_ids) == 6
            assert len(completion.logprobs) == len(completion.token_ids)
            assert all(map(math.isfinite, completion.logprobs))
    assert seen == {"stop", "length"}


def test_every_end_of_the_model_and_the_tokenizer_stops(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    assert stop_token_ids(tmp_path, tokenizer) == (2,)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0, 2], "pad_token_id": 2}')
    assert stop_token_ids(tmp_path, tokenizer) == (0, 2, 7)
    (tmp_path / "generation_config.json").write_text("{}")
    bare = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")))
    with pytest.raises(ConfigError, match=r"no end-of-sequence token: set eos_token_id in generation_config\.json"):
        stop_token_ids(tmp_path, bare)


# -- prompts ---------------------------------------------------------------------------------------------------------

BOS_IN_TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m['content'] }} {% endfor %}"
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role\n not supported') }}{% endif %}a"


def tokenizer_with_bos(template: str | None) -> PreTrainedTokenizerFast:
    """Words; it puts <s> before every text, has no pad token, and `template` for conversations."""
    words = Tokenizer(WordLevel({"<s>": 0, "</s>": 1, "[UNK]": 2, "a": 3, "b": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = Whitespace()
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="[UNK]")
    made.chat_template = template
    assert made.pad_token is None
    return made


@pytest.mark.parametrize("template", [None, BOS_IN_TEMPLATE])
def test_a_prompt_begins_with_one_beginning(template: str | None) -> None:
    """Whether the template writes it or the tokenizer adds it."""
    assert render_prompt(tokenizer_with_bos(template), problem("a b"), 64) == (0, 3, 4)


def test_without_a_template_a_prompt_is_the_plain_text_of_its_messages() -> None:
    asked = problem("a", "b", "a", roles="system assistant user")
    assert render_prompt(tokenizer_with_bos(None), asked, 64) == (0, 3, 4, 3)


@pytest.mark.parametrize("template, message", [
    (NO_SYSTEM, "System role not supported"),
    ("{{ messages[0].nothing.more }}", "'dict object' has no attribute 'nothing'"),
    ("{% if %}", "Expected an expression"),
    ("{{ 1 + messages[0]['content'] }}", "unsupported operand"),
])  # fmt: skip
def test_a_template_that_refuses_is_told_in_one_line(template: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        render_prompt(tokenizer_with_bos(template), problem("a", "b", roles="system user"), 64)
    text = str(error.value)
    assert "\n" not in text and message in text
    assert text.startswith("problem 'p': the model's chat template refuses its messages (roles: system, user)")


def test_prompts_that_are_too_long_or_empty_are_told_in_one_line(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(ConfigError) as error:
        render_prompt(tokenizer, problem("word " * 5000), 512)
    count = len(render_prompt(tokenizer, problem("word " * 5000), 10**6))
    assert str(error.value) == (
        f"problem 'p': its prompt has {count} tokens, rollout.max_prompt_tokens=512 are allowed; "
        f"raise rollout.max_prompt_tokens to at least {count}"
    )
    with pytest.raises(ConfigError, match="problem 'p': its prompt has no tokens"):
        render_prompt(tokenizer_with_bos("{% for m in [] %}{% endfor %}"), problem("a"), 64)


@pytest.mark.parametrize(
    "text", ["", "\x00", "\ufffd" * 100, "\u202e#### 18", "\U0001f999" * 50, "<|im_end|>" * 20, "a\r\n"]
)
def test_any_text_can_be_asked(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert len(render_prompt(tokenizer, problem(text), 4096)) > 0


def test_a_tokenizer_without_a_template_is_told(tmp_path: Path, tiny_model: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in tiny_model.iterdir():
        if file.name != "chat_template.jinja":
            (folder / file.name).symlink_to(file)
    config = load_config(write_tiny_config(tmp_path / "tiny.yaml", folder, tmp_path), ["rollout.engine=scripted"])
    said: list[str] = []
    assemble(config, say=said.append).close()
    assert said == ["note       the tokenizer has no chat template: a prompt is the plain text of its messages"]
