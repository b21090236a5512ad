"""Several processes and machines: learner processes of one machine, workers by hand, a Slurm job."""
