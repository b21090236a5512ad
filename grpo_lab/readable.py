"""Completions as text for a terminal: model text wrapped, its control characters spelt out, long text cut in the middle."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.cells import cell_len, chop_cells

from grpo_lab.config import Config
from grpo_lab.errors import counted
from grpo_lab.reading import Seen, counts, mean_reward

Decode = Callable[[Sequence[int]], str | None]
_UNSEEN = (
    "Cc",
    "Cf",
    "Cs",
    "Zl",
    "Zp",
)  # control, format (bidi, zero width), surrogates, line and paragraph separators
_HEAD, _TAIL = 16, 8  # lines that are kept of a long text


@dataclass(frozen=True)
class Layout:
    """Columns of the terminal, and whether long texts are shown whole."""

    width: int
    full: bool = False


def visible(text: str) -> str:
    r"""Text that cannot act on a terminal: what is not seen is spelt out as \x1b or \u202e; line breaks and tabs stay."""
    return "".join(_spelt(character) for character in text)


def _spelt(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in _UNSEEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"


def body(text: str, layout: Layout) -> list[str]:
    """The lines of a text, each behind a bar; of a long one the first and the last."""
    lines = [part for line in visible(text).expandtabs(4).split("\n") for part in wrap(line, layout.width - 4)]
    left_out = len(lines) - _HEAD - _TAIL
    if left_out > 1 and not layout.full:
        lines = [*lines[:_HEAD], f"... {left_out:,} lines left out, --full shows them ...", *lines[-_TAIL:]]
    return [f"  | {line}".rstrip() for line in lines]


def wrap(line: str, width: int) -> list[str]:
    """A line as lines of at most `width` columns, broken at blanks where there are any; wide characters count two."""
    lines, current = list[str](), ""
    for index, word in enumerate(line.split(" ")):
        joined = f"{current} {word}" if index else word
        if cell_len(joined) <= width:
            current = joined
            continue
        lines += [current] if current.strip() else []
        *whole, current = chop_cells(word, width) or [""]
        lines += whole
    return [*lines, current]


def summary(every: Sequence[Seen]) -> str:
    """Counts, mean reward, lengths and versions of a batch, in one line."""
    outcomes = ", ".join(f"{count} {what}" for what, count in counts(every).items() if count or what != "partial")
    lengths = [one.tokens for one in every]
    versions = sorted(
        {version for one in every for version in (one.weight_version, one.weight_version_end) if version is not None}
    )
    weights = f"{versions[0]}" if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
    return (
        f"{len(every)} completions of {counted(len({one.group for one in every}), 'problem')}: {outcomes}; mean reward "
        f"{mean_reward(every):.3f}; {min(lengths)} to {max(lengths)} tokens, {sum(lengths) / len(lengths):.1f} on average; "
        f"weights {weights}"
    )


def lines(every: Sequence[Seen], chosen: Sequence[Seen], decode: Decode, layout: Layout) -> list[str]:
    """The chosen completions below their problems. `decode` gives a prompt's text, or None where there is no tokenizer."""
    said = []
    for number, group in groupby(chosen, key=lambda one: one.group):
        siblings = [one for one in every if one.group == number]
        right, graded = counts(siblings)["correct"], counts(siblings)["partial"] > 0
        mean = f", mean reward {mean_reward(siblings):.3f}" if graded else ""
        first, *others = group
        prompt = decode(first.prompt_ids)
        said += [
            "",
            f"problem {_quoted(first.problem)}, expected {_quoted(first.answer)}; {right} of {len(siblings)} correct{mean}",
        ]
        said += body(prompt, layout) if prompt is not None else [f"  | ({len(first.prompt_ids)} prompt tokens)"]
        for one in (first, *others):
            said += ["", f"  [{one.sibling}] {_facts(one)}", *body(one.text, layout)]
    return said


def _facts(one: Seen) -> str:
    missing = ", no answer found" if one.outcome == "unparsable" else ""
    extracted = missing if one.extracted is None else f", answer {_quoted(one.extracted)}"
    advantage = "" if one.advantage is None else f", advantage {one.advantage:+.3f}"
    last = one.weight_version_end
    weights = f"{one.weight_version}" + (f" to {last}" if last not in (None, one.weight_version) else "")
    return f"{one.outcome}, reward {one.reward:g}{extracted}, {one.tokens} tokens{advantage}, weights {weights}"


def _quoted(text: str) -> str:
    """A short text in quotes, on one line."""
    plain = visible(text).replace("\n", "\\n").replace("\t", "\\t")
    return f"'{plain if len(plain) <= 60 else plain[:40] + ' ... ' + plain[-15:]}'"


def decoder(config: Config, checkpoints: Sequence[Path]) -> Decode:
    """Prompt ids -> text by the tokenizer of the model's folder, of a checkpoint, or of the hub's cache; never the network."""
    file = _tokenizer_file(config, checkpoints)
    if file is None:
        return lambda ids: None
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: tokenizer.decode(list(ids), skip_special_tokens=False)


def _tokenizer_file(config: Config, checkpoints: Sequence[Path]) -> Path | None:
    for folder in (Path(config.model.place), *reversed(checkpoints)):
        if (folder / "tokenizer.json").is_file():
            return folder / "tokenizer.json"
    if Path(config.model.place).is_dir() or config.model.place.count("/") != 1:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(config.model.place, "tokenizer.json", revision=config.model.revision)
    return Path(found) if isinstance(found, str) else None
