"""What a run looks like at one moment: a picture of its numbers -> something rich draws. No input or output here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from grpo_lab.terminal.clock import Left, Phase, duration
from grpo_lab.terminal.glyphs import Glyphs, gauge, shares, sparkline
from grpo_lab.terminal.plain import mismatch

HISTORY = 40
CURVES = {
    "reward": "reward/mean",
    "KL": "policy/kl_ref",
    "F batch": "policy/free_energy",
    "tokens": "completion/length_mean",
}
NAMES: dict[Phase, str] = {
    "loading": "loading",
    "reference": "sampling the reference, for the floor",
    "sampling": "sampling",
    "annotate": "log-probs under learner and reference",
    "update": "updating",
    "sync": "pushing the weights",
    "record": "writing the record",
    "save": "saving a checkpoint",
    "evaluate": "evaluating",
}
_PARTS = {"sampling": "cyan", "annotate": "blue", "update": "green", "sync": "magenta"}
_LABEL, _SHORT_LABEL, _VALUE, _RIGHT = 12, 9, 8, 22  # columns
_NARROW, _ROOMY = 50, 72
_FRAME = 4  # lines: the border's, and what a warning may wrap to


@dataclass(frozen=True)
class Evaluated:
    """The newest evaluation, F of the reference, and the floor's bracket."""

    rollouts: int
    free_energy: float
    error: float
    reference: float
    lower: float
    upper: float


@dataclass(frozen=True)
class Picture:
    """What a panel shows. Times in seconds; `metrics` of the last step, `curves` by label, oldest first."""

    title: str = ""
    place: str = ""
    step: int = 0
    steps: int = 0
    rollouts: int = 0
    total_rollouts: int = 0
    elapsed: float = 0.0
    left: Left | None = None
    phase: Phase | None = "loading"
    phase_s: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    curves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    evaluated: Evaluated | None = None
    warning: str = ""
    notice: str = ""


def draw(picture: Picture, width: int, height: int, glyphs: Glyphs) -> RenderableType:
    """The panel for `width` columns, with empty lines where `height` has room; one line before the run has started."""
    phase = _phase_line(picture, glyphs)
    if not picture.steps:
        return phase
    inner = width - 4
    rows = [_progress(picture, inner, glyphs), _times(picture, glyphs), Text("")]
    if picture.metrics:
        rows += [*_numbers(picture, inner, glyphs), Text("")]
    if picture.evaluated:
        rows += [*_evaluated(picture.evaluated, inner, glyphs), Text("")]
    if picture.metrics:
        rows += _last_step(picture.metrics, inner, glyphs)
    rows += [phase] if picture.phase else []
    for row in rows:
        row.no_wrap, row.overflow = inner >= _ROOMY, "crop"
    notes = [(f"{glyphs.warning} {picture.warning}", "yellow"), (picture.notice, "bold yellow")]
    rows += [Text(text, style) for text, style in notes if text.strip(glyphs.warning + " ")]
    if len(rows) + _FRAME > height:
        rows = [row for row in rows if row.plain]
    return Panel(
        Group(*rows),
        box=box.ROUNDED if glyphs.point != "O" else box.ASCII,
        title=Text(picture.title, "bold", overflow="crop"),
        title_align="left",
        subtitle=Text(picture.place, "dim", overflow="crop"),
        subtitle_align="right",
        border_style="cyan",
        width=width,
    )


def _phase_line(picture: Picture, glyphs: Glyphs) -> Text:
    if picture.phase is None:
        return Text("")
    frame = glyphs.spinner[int(picture.phase_s * 4) % len(glyphs.spinner)]
    name = NAMES[picture.phase]
    number = f"step {picture.step + 1}: " if picture.phase in ("sampling", "annotate", "update", "sync") else ""
    return Text.assemble((f"{frame} ", "cyan"), f"{number}{name}", (f"  {duration(picture.phase_s)}", "dim"))


def _progress(picture: Picture, inner: int, glyphs: Glyphs) -> Text:
    head = f"step {picture.step:>{len(str(picture.steps))}}/{picture.steps}  "
    share = picture.step / picture.steps
    tail = f" {share:>4.0%}"
    cells = max(inner - len(head) - len(tail), 0)
    done = round(share * cells)
    return Text.assemble(
        (head, "bold"), (glyphs.done * done, "cyan"), (glyphs.todo * (cells - done), "dim"), (tail, "bold")
    )


def _times(picture: Picture, glyphs: Glyphs) -> Text:
    parts = [f"{picture.rollouts:,} of {picture.total_rollouts:,} rollouts", f"elapsed {duration(picture.elapsed)}"]
    if picture.left and picture.step < picture.steps:
        share = f" (evaluations {duration(picture.left.evaluations)})" if picture.left.evaluations >= 1 else ""
        parts.append(f"left {duration(picture.left.total)}{share}")
    return Text(f"  {glyphs.dot}  ".join(parts), "dim")


def _numbers(picture: Picture, inner: int, glyphs: Glyphs) -> list[Text]:
    """Curves at the left, single numbers at the right; below _NARROW columns without the curves."""
    metrics = picture.metrics
    right = {
        "gate open": f"{metrics['gate/open_fraction']:.3f}",
        "grad norm": f"{metrics['policy/grad_norm']:.3g}",
        "mismatch": f"{mismatch(metrics):.1e}",
        "tokens/s": f"{metrics['perf/tokens_per_second']:,.0f}",
    }
    label_width = _LABEL if inner >= _NARROW else _SHORT_LABEL
    room = min(HISTORY, inner - _LABEL - _VALUE - _RIGHT - 5)
    rows = []
    for (label, name), (other, number) in zip(CURVES.items(), right.items(), strict=True):
        value = metrics[name]
        text = f"{value:.1f}" if label == "tokens" else f"{value:.3f}"
        curve = sparkline(picture.curves.get(label, ()), room, glyphs) if inner >= _NARROW else ""
        row = Text.assemble((f"{label:<{label_width}}", "dim"), (f"{_minus(text, glyphs):>{_VALUE}}", "bold"))
        row.append(f"  {curve:<{max(room, 0)}}   " if inner >= _NARROW else "  ", _CURVE_STYLES[label])
        row.append(f"{other:<{_RIGHT - 10}}", "dim").append(f"{number:>10}", "bold")
        rows.append(row)
    return rows


_CURVE_STYLES = {"reward": "green", "KL": "yellow", "F batch": "cyan", "tokens": "blue"}


def _evaluated(e: Evaluated, inner: int, glyphs: Glyphs) -> list[Text]:
    signed = lambda value: _minus(f"{value:+.3f}", glyphs)  # noqa: E731
    first = Text.assemble(
        (f"{'F held out':<{_LABEL}}", "dim"),
        (f"{signed(e.free_energy):>{_VALUE}}", "bold"),
        (f" {glyphs.plus_minus} {e.error:.3f}  at {e.rollouts:,} rollouts", "dim"),
        (f"   floor [{signed(e.lower)}, {signed(e.upper)}]" if inner >= _ROOMY else "", "dim"),
    )
    is_worse = e.free_energy > e.reference
    head = f"held out {signed(e.free_energy)} " if is_worse else f"reference {signed(e.reference)} "
    tail = f" {signed(e.lower)} floor"
    line = gauge(e.reference, e.free_energy, e.lower, e.upper, max(inner - len(head) - len(tail), 2), glyphs)
    styles = {glyphs.between: "dim", glyphs.bracket: "green", glyphs.point: "bold red" if is_worse else "bold cyan"}
    drawn = Text.assemble(*((cell, styles.get(cell, "")) for cell in line))
    return [first, Text.assemble((head, "dim"), drawn, (tail, "dim"))]


def _last_step(metrics: Mapping[str, float], inner: int, glyphs: Glyphs) -> list[Text]:
    """A bar of the last step's parts, and the same in seconds; sampling ahead counts as far as the learner waited for it."""
    sampling = metrics.get("time/wait_rollouts", metrics["time/generate"])
    seconds = [sampling, *(metrics[f"time/{name}"] for name in ("annotate", "update", "sync"))]
    head = f"{'last step':<{_LABEL}}{sum(seconds):>{_VALUE - 2}.1f} s  "
    bar, legend = Text.assemble((head, "dim")), Text(" " * _LABEL if inner >= _ROOMY else "")
    for cells, mark, (name, style), spent in zip(
        shares(seconds, inner - len(head)), glyphs.segments, _PARTS.items(), seconds, strict=True
    ):
        bar.append(mark * cells, style)
        legend.append(mark, style).append(f" {name} ", "dim").append(f"{spent:.1f}   ")
    return [bar, legend]


def _minus(number: str, glyphs: Glyphs) -> str:
    return number.replace("-", glyphs.minus)
