"""`python -m grpo_lab` is the same as `grpo-lab`."""

from grpo_lab.cli import main

main()
