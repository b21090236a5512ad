"""grpo_lab: GRPO-family training and its free energy."""
