"""Files that are whole or absent, a run that is one process's at a time, checkpoints that are kept, rollouts as parquet."""
