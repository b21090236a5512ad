"""Runs -> one HTML page that needs no network and runs no script: figures as data, every text escaped."""

from __future__ import annotations

import base64
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from grpo_lab.config import Config
from grpo_lab.config.file import PLACE
from grpo_lab.console import describe_config
from grpo_lab.evaluation import comparison
from grpo_lab.evaluation.columns import without_empty
from grpo_lab.evaluation.figures import draw_curves, draw_training
from grpo_lab.evaluation.kept import read_evaluations
from grpo_lab.evaluation.samples import Sample, choose_samples
from grpo_lab.metric_guide import GUIDE, newest_values
from grpo_lab.objective.axes import resolve
from grpo_lab.run_dir import RunDir
from grpo_lab.storage.records import read_groups
from grpo_lab.storage.scratch import write_whole
from grpo_lab.thermo.statistics import Estimate

SAMPLES = 8
FIGURES = {
    "free_energy": "Free energy against rollouts, with the floor's bracket and the reference.",
    "reward_kl": "Reward and KL to the reference on the held-out problems, against rollouts.",
    "frontier": "Reward over KL: the checkpoints, and the Gibbs policies of all temperatures, which no policy passes.",
    "landscape": "Free energy over temperature: floor, reference and the last checkpoint; below, the heat capacity.",
    "gap_split": "The gap to the floor at each evaluation, taken apart into wrong tilt and wasted KL.",
    "training": "Reward, KL and the gate's open share of the training batches, against rollouts.",
}
EVALUATION_HEAD = ("rollouts", "E[r]", "KL (k1)", "KL (RB)", "F", "F − F_ref", "floor F*", "truncated", "unparsable")


def write_page(runs: Sequence[RunDir], path: Path) -> None:
    """Write the report of `runs` to `path`. RunError when it cannot be written there."""
    template = files("grpo_lab.evaluation").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    configs = [flat_config(run.config) for run in runs]
    differing = differing_keys(configs)
    text = environment.from_string(template).render(
        runs=[_run(run, config, differing) for run, config in zip(runs, configs, strict=True)],
        overview=_overview(runs),
        differences=[(key, [config.get(key, "") for config in configs]) for key in differing],
        written=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        version=version("grpo-lab"),
    )
    write_whole(path, text, "give a file in a writable folder")


def flat_config(config: Config) -> dict[str, str]:
    """Every setting as text, by its dotted key."""

    def walk(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, str]]:
        pairs = []
        for key, value in tree.items():
            nested = isinstance(value, Mapping) and value
            pairs += walk(value, f"{prefix}{key}.") if nested else [(prefix + key, _text(value))]
        return pairs

    return dict(walk(config.model_dump(mode="json"), ""))


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """Keys whose values are not the same everywhere, in their order; not those that say where a run lies."""
    keys = dict.fromkeys(key for config in configs for key in config if key not in PLACE)
    return [key for key in keys if len({config.get(key, "") for config in configs}) > 1]


def _text(value: object) -> str:
    return (
        yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).removesuffix("...\n").strip()
    )


def _run(run: RunDir, config: Mapping[str, str], differing: Sequence[str]) -> dict[str, Any]:
    rows, metrics = read_evaluations(run), run.read_metrics()
    figures = _drawn(lambda folder: draw_curves(rows, folder)) if rows else []
    figures += _drawn(lambda folder: draw_training(metrics, folder)) if metrics else []
    described = [line.split(maxsplit=1) for line in describe_config(run.config, resolve(run.config))]
    step, samples = _samples(run)
    values = _metrics(run)
    return {
        "name": run.path.name,
        "facts": [(head, text) for head, text in described if head != "warning"],
        "warnings": [text for head, text in described if head == "warning"],
        "tiles": _tiles(rows[-1]) if rows else [],
        "evaluations": [evaluation_cells(row) for row in rows],
        "evaluation_head": EVALUATION_HEAD,
        "is_graded": bool(rows) and not all(row["gap_split"] for row in rows),
        "metrics": values,
        "looks": _looks(values),
        "figures": figures,
        "samples": samples,
        "samples_step": step,
        "config": [(key, value, key in differing) for key, value in config.items()],
    }


def evaluation_cells(row: Mapping[str, Any]) -> list[str]:
    """One evaluation as text, by `EVALUATION_HEAD`."""
    names = ("reward", "kl", "kl_rao_blackwell", "free_energy", "against_reference")
    shares = [f"{row[name]:.1%}" for name in ("truncated", "unparsable")]
    return [f"{row['rollouts']:,}", *(_estimate(row[name]) for name in names), _floor(row), *shares]


def _tiles(row: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The newest evaluation in five numbers: name, value, what to hold it against."""
    energy, floor = row["free_energy"]["mean"], row["floor"]
    ends = [_signed(energy - floor[end]["mean"]) for end in ("upper", "lower")]
    return [
        ("E[r]", _estimate(row["reward"]), f"reference {row['reference_reward']['mean']:.3f}"),
        ("KL, nats", _estimate(row["kl"]), f"Rao–Blackwell {row['kl_rao_blackwell']['mean']:.3f}"),
        ("F", _estimate(row["free_energy"]), f"at β = {row['beta']:g}; reference {_signed(-row['reference_reward']['mean'])}"),
        ("F − F_ref", _estimate(row["against_reference"]), "paired by problem; below 0 is better"),
        ("gap F − F*", " to ".join(dict.fromkeys(ends)), f"floor {_floor(row)}"),
    ]  # fmt: skip


def _metrics(run: RunDir) -> list[dict[str, Any]]:
    """The newest value of every metric with what the guide says of it; those that need a look first."""
    values = newest_values(run)
    known = [(name, value, GUIDE[name]) for name, value in values.items() if name in GUIDE]
    shown = [
        {"name": n, "value": f"{v:,.0f}" if float(v).is_integer() else f"{v:.4g}", "guide": g, "healthy": g.is_healthy(v)}
        for n, v, g in known
    ]  # fmt: skip
    return sorted(shown, key=lambda metric: bool(metric["healthy"]))


def _looks(metrics: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    """The metrics outside their range, by what to do about them."""
    unhealthy = [metric for metric in metrics if not metric["healthy"]]
    remedies = dict.fromkeys(metric["guide"].remedy for metric in unhealthy)
    return [(remedy, [m for m in unhealthy if m["guide"].remedy == remedy]) for remedy in remedies]


def _samples(run: RunDir) -> tuple[int, list[Sample]]:
    """A few completions of the newest recorded step, of every outcome."""
    recorded = run.rollout_files()
    if not recorded:
        return 0, []
    step = max(recorded)
    return step, choose_samples(read_groups(recorded[step])[0], SAMPLES)


def _overview(runs: Sequence[RunDir]) -> dict[str, Any] | None:
    """The runs that have an evaluation, side by side; None of a single one."""
    places = [place for place, run in enumerate(runs, start=1) if read_evaluations(run)]
    items = comparison.compared(runs)
    if len(items) < 2:
        return None
    shown = without_empty([comparison.HEAD, *map(comparison.cells, items)])
    head, *rows = [[_minus(cell) for cell in row] for row in shown]
    figures = _drawn(lambda folder: comparison.draw(items, folder / "comparison"))
    return {"head": head, "rows": list(zip(places, rows, strict=True)), "figures": figures}


def _drawn(draw: Callable[[Path], Sequence[Path]]) -> list[dict[str, str]]:
    """The SVG files that `draw` makes in a folder, as data with their captions."""
    with tempfile.TemporaryDirectory() as folder:
        return [
            {
                "data": f"data:image/svg+xml;base64,{base64.b64encode(file.read_bytes()).decode()}",
                "caption": FIGURES.get(file.stem, "Free energy against rollouts, by method and recipe."),
            }
            for file in draw(Path(folder))
            if file.suffix == ".svg"
        ]


def _estimate(value: Mapping[str, float]) -> str:
    return _minus(str(Estimate(**value)))


def _floor(row: Mapping[str, Any]) -> str:
    return f"[{_signed(row['floor']['lower']['mean'])}, {_signed(row['floor']['upper']['mean'])}]"


def _signed(value: float) -> str:
    return _minus(f"{value:+.3f}")


def _minus(text: str) -> str:
    """`text` with the signs a page has: a minus that is no hyphen, ± for +-, β for beta."""
    return re.sub(r"(?<![\w)])-(?=[\d. ])", "−", text.replace("+-", "±").replace("beta", "β"))
