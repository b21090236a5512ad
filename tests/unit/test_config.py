"""Configs: what is refused, in one line, and what each line tells."""

from pathlib import Path

import pytest

from grpo_lab.config import Config, cache_folder, expand_path
from grpo_lab.config.file import build_config, changed_keys, dump_yaml, load_config
from grpo_lab.errors import ConfigError
from grpo_lab.objective.advice import effective_beta_line, warnings
from grpo_lab.objective.axes import resolve
from grpo_lab.seeding import derive_seed


@pytest.mark.parametrize("override, message", [
    ("learner.learnin_rate=1", "did you mean 'learner.learning_rate'"),
    ("bta=0.1", "did you mean 'beta'"),
    ("beta=0", "greater than 0"),
    ("beta=-1", "beta=-1"),
    ("beta=abc", "beta='abc'"),
    ("beta", "expected key.path=value"),
    ("=1", "expected key.path=value"),
    ("group_size=1", "greater than or equal to 2"),
    ("group_size=7", "not a multiple"),
    ("total_rollouts=1000", "use for example total_rollouts=1024"),
    ("checkpoint_every=100", "checkpoint_every=100"),
    ("model.dtype=float8", "'float32', 'bfloat16' or 'float16'"),
    ("model=tiny", "model='tiny'"),
    ("seed.x=1", "seed"),
    ("learner.mini_batches=5", "does not divide"),
    ("evaluation.problems=501", "held out"),
    ("rollout.top_p=1.5", "less than or equal to 1"),
    ("objective.kl=k3", "loss_k3"),
    ("learner.learning_rate=.nan", "finite"),
])  # fmt: skip
def test_wrong_settings_are_one_line(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, [override])
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_wrong_files(tmp_path: Path) -> None:
    for name, text, message in (
        ("a.yaml", "beta: [1", "not valid YAML"),
        ("b.yaml", "- 1\n- 2", "must be a mapping"),
        ("c.yaml", "model: {nme: x}", "did you mean 'model.name'"),
        ("d.yaml", "beta: 0.1\nbeta: 0.2", "the key 'beta' stands twice"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path / name)
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "absent.yaml")


def test_the_source_of_a_wrong_value_is_named(tmp_path: Path) -> None:
    (tmp_path / "e.yaml").write_text("beta: 0.1\nlearner: {passes: 0}")
    with pytest.raises(ConfigError, match=r"e\.yaml: learner\.passes=0"):
        load_config(tmp_path / "e.yaml")
    (tmp_path / "f.yaml").write_text("beta: 0.1")
    for overrides, flags in ((["learner.passes=0"], {}), ([], {"beta": -1.0})):
        with pytest.raises(ConfigError, match=r"^command line: "):
            load_config(tmp_path / "f.yaml", overrides, flags)


def test_numbers_as_people_write_them() -> None:
    assert load_config(None, ["learner.learning_rate=1e-5"]).learner.learning_rate == 1e-5
    assert load_config(None, ["total_rollouts=262_144"]).total_rollouts == 262_144


def test_dump_reads_back_equal(tmp_path: Path) -> None:
    config = load_config(None, ["beta=0.2", "objective.kl=loss_k3", "data.options={grading: flexible}"])
    (tmp_path / "config.yaml").write_text(dump_yaml(config))
    assert load_config(tmp_path / "config.yaml") == config


def test_flags_override_file_and_set(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("beta: 0.1\nmethod: ppo")
    config = load_config(tmp_path / "c.yaml", ["method=grpo"], {"beta": 0.3, "seed": None})
    assert (config.beta, config.method, config.seed) == (0.3, "grpo", 0)


def test_only_trajectory_keys_count_as_changed() -> None:
    base = Config()
    free = base.model_copy(update={"output_dir": "elsewhere", "total_rollouts": 524_288})
    assert changed_keys(base, free) == []
    assert changed_keys(base, base.model_copy(update={"beta": 0.1})) == ["beta: 0.05 -> 0.1"]
    linear = base.model_copy(update={"learner": base.learner.model_copy(update={"schedule": "linear"})})
    longer = linear.model_copy(update={"total_rollouts": 524_288})
    assert changed_keys(linear, longer) == ["total_rollouts: 262144 -> 524288"]


def test_recipes_and_overrides() -> None:
    free, paper = (resolve(Config(method="grpo", recipe=r)) for r in ("free_energy", "paper"))  # type: ignore[arg-type]
    assert free.minimises_free_energy and not paper.minimises_free_energy
    assert (paper.advantage, paper.kl, paper.aggregate) == ("zscore", "loss_k3", "sequence_mean")
    own = resolve(build_config({"method": "dapo", "objective": {"gate": "sigmoid", "kl": "loss_k2"}}, "test"))
    assert (own.gate, dict(own.gate_options), own.kl, own.advantage) == ("sigmoid", {}, "loss_k2", "leave_one_out")


@pytest.mark.parametrize("objective, message", [
    ({"old": "rollout", "correction": "tis"}, "twice"),
    ({"correction": "tis", "correction_options": {"low": 1.0}}, "has no low; it has: cap"),
    ({"correction_options": {"cap": 1.0}}, "no parameters"),
    ({"correction": "icepop", "correction_options": {"low": 5.0, "high": 0.5}}, "a band holds ratio 1"),
    ({"correction": "tis", "correction_options": {"cap": -1.0}}, "above 0"),
    ({"dynamic_sampling": True}, "drops the KL force"),
    ({"overlong_cache": 600}, "more than rollout.max_new_tokens=512"),
    ({"overlong_cache": 100, "mask_truncated": True}, "choose one"),
])  # fmt: skip
def test_meaningless_combinations_are_refused_with_the_reason(objective: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(build_config({"method": "dapo", "objective": objective}, "test"))


@pytest.mark.parametrize("tree, message", [
    ({"learner": {"mini_batches": 1}}, "gate inert"),
    ({"recipe": "paper", "method": "grpo"}, "divided by std"),
    ({"recipe": "paper", "method": "grpo"}, "token-local"),
    ({"recipe": "paper", "method": "ppo"}, "divided by std(R)"),
    ({"recipe": "paper", "method": "sapo"}, "no KL in the loss"),
    ({"recipe": "paper", "method": "dapo"}, "dynamic sampling drops"),
    ({"recipe": "paper", "method": "dapo"}, "overlong penalty over the last 102 of 512 tokens"),
    ({"objective": {"kl": "loss_k1"}}, "expected gradient 0"),
    ({"objective": {"kl": "loss_k3", "dynamic_sampling": True}}, "beta_eff = beta x P"),
    ({"objective": {"kl": "loss_k2", "advantage": "center"}}, "G/(G-1)"),
    ({"objective": {"kl": "loss_k2", "advantage": "batch_zscore"}}, "moving with the batch"),
    ({"objective": {"mask_truncated": True}}, "truncated completions give no gradient"),
    ({"method": "gspo", "objective": {"old": "rollout"}}, "sequence ratio"),
    ({"rollout": {"temperature": 0.8}}, "temperature 0.8"),
    ({"rollout": {"top_p": 0.95}}, "top-p 0.95"),
])  # fmt: skip
def test_questionable_choices_warn(tree: dict[str, object], message: str) -> None:
    config = build_config(tree, "test")
    lines = warnings(config, resolve(config))
    assert sum(message in line for line in lines) == 1
    assert len(set(lines)) == len(lines) and not any("\n" in line for line in lines)


@pytest.mark.parametrize("objective, line", [
    ({"kl": "none"}, "beta_eff = 0"),
    ({"kl": "loss_k2_sequence"}, "beta_eff = 0.05: the loss descends F = -E[r] + 0.05 KL exactly (sequence KL in the loss)"),
    ({"kl": "loss_k2_sequence", "advantage": "center"}, "beta_eff = 0.0516129: descends F at that temperature"),
    ({"kl": "loss_k2_sequence", "aggregate": "sequence_mean"}, "beta_eff = 0.05, but sequence_mean weights shift"),
    ({"kl": "loss_k1"}, "beta_eff = 0: the expected gradient"),
    ({"overlong_cache": 100}, "beta_eff = 0.05 at the fixed point (KL in the reward), but with the overlong penalty"),
    ({"kl": "loss_k3"}, "beta_eff = 0.05, token-local"),
    ({"advantage": "zscore"}, "beta_eff = 0.05 at the fixed point"),
    ({"kl": "loss_k3", "advantage": "zscore"}, "beta_eff = 0.05 x std(r) of each prompt"),
    ({"kl": "loss_k3", "advantage": "batch_zscore"}, "beta_eff = 0.05 x std(r) of the batch"),
    ({"aggregate": "sequence_sum"}, "beta_eff = 0.05: the loss descends F"),
])  # fmt: skip
def test_the_effective_beta_is_said(objective: dict[str, object], line: str) -> None:
    resolved = resolve(build_config({"method": "grpo", "objective": objective}, "test"))
    assert effective_beta_line(resolved, 32).startswith(line)


def test_the_default_run_warns_of_nothing_and_optimises_beta() -> None:
    config = Config(method="dapo")
    assert warnings(config, resolve(config)) == []
    assert effective_beta_line(resolve(config), 32).startswith("beta_eff = 0.05: the loss descends F")


def test_derived_seeds_are_stable_and_distinct() -> None:
    """The first value is BLAKE2b of the documented key, computed with another tool."""
    import hashlib

    key = "\x1f".join(["7", "rollout", "3", "p", "0"]).encode()
    expected = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") % 2**63
    assert derive_seed(7, "rollout", 3, "p", 0) == expected
    seeds = {derive_seed(s, p, i, j) for s in range(3) for p in ("a", "b") for i in range(20) for j in range(20)}
    assert len(seeds) == 3 * 2 * 400


def test_the_cache_folder_is_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's script and the configs agree on it, whatever the environment says."""
    monkeypatch.delenv("GRPO_LAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert expand_path("$GRPO_LAB_CACHE/m") == str(cache_folder() / "m") == "/somewhere/grpo_lab/m"
    monkeypatch.setenv("GRPO_LAB_CACHE", "/elsewhere")
    assert expand_path("$GRPO_LAB_CACHE/m") == "/elsewhere/m"
    assert expand_path("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen/Qwen2.5-0.5B-Instruct"
