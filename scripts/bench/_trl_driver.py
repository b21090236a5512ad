"""Runs in TRL's own environment, started by trl.py: GRPOTrainer on the job read from a file; writes its steps' seconds.

Knows nothing of grpo_lab. Job: the JSON that trl.py writes. Result: {"steps": [{"seconds", "length", "reward"}],
"versions"}, one entry an optimizer step, from on_step_begin to on_step_end: sampling (where it falls), scoring, update.
"""

import json
import re
import sys
import time
from importlib.metadata import version
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def exact_answer(completions, answer, **_):
    """1 when the last number of a completion is the answer."""
    texts = [completion[-1]["content"] for completion in completions]
    found = [NUMBER.findall(text) for text in texts]
    return [float(bool(f) and f[-1].replace(",", "") == a.replace(",", "")) for f, a in zip(found, answer, strict=True)]


class Stopwatch(TrainerCallback):
    """Seconds of every step, and what the trainer logs of it."""

    def __init__(self):
        self.steps, self._start = [], 0.0

    def on_step_begin(self, args, state, control, **_):
        self._start = time.perf_counter()

    def on_step_end(self, args, state, control, **_):
        self.steps.append({"seconds": time.perf_counter() - self._start})

    def on_log(self, args, state, control, logs=None, **_):
        if logs and "completions/mean_length" in logs:
            self.steps[-1] |= {"length": logs["completions/mean_length"], "reward": logs["reward"]}


def configuration(job):
    """What the job asks for, and TRL's fastest settings for the rest: no gradient checkpointing, no autocast, no vLLM."""
    batch = job["prompts_per_step"] * job["group_size"]
    assert batch % job["rows"] == 0, "the rollouts of a step must be a multiple of the rows of a micro-batch"
    micro_batches = batch // job["rows"]
    return GRPOConfig(
        output_dir=job["output_dir"],
        model_init_kwargs={"dtype": job["dtype"]},
        bf16=False,  # the weights have the dtype already; autocast over them only costs
        use_cpu=not torch.cuda.is_available(),
        per_device_train_batch_size=job["rows"],
        gradient_accumulation_steps=micro_batches // job["mini_batches"],
        steps_per_generation=micro_batches,
        num_iterations=job["passes"],
        num_generations=job["group_size"],
        max_steps=job["steps"] * job["passes"] * job["mini_batches"],
        max_completion_length=job["max_new_tokens"],
        temperature=job["temperature"],
        top_p=job["top_p"],
        top_k=0,
        repetition_penalty=1.0,
        use_vllm=False,
        use_transformers_continuous_batching=job["continuous_batching"],
        beta=job["beta"],
        loss_type="dr_grpo",  # sums over a constant length, as the free_energy recipe does
        scale_rewards="none",
        epsilon=0.2,
        epsilon_high=0.28,
        learning_rate=job["learning_rate"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=job["weight_decay"],
        max_grad_norm=job["max_grad_norm"],
        gradient_checkpointing=False,
        shuffle_dataset=False,
        seed=job["seed"],
        dataloader_pin_memory=False,
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        save_strategy="no",
    )


def main():
    job = json.loads(Path(sys.argv[1]).read_text())
    watch = Stopwatch()
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=exact_answer,
        args=configuration(job),
        train_dataset=Dataset.from_list(job["problems"]),
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[watch],
    )
    trainer.train()
    versions = {"trl": version("trl"), "transformers": transformers.__version__, "torch": torch.__version__}
    Path(sys.argv[2]).write_text(json.dumps({"steps": watch.steps, "versions": versions}))


if __name__ == "__main__":
    main()
