"""sbatch, srun and scontrol as far as a job script needs them: a link of that name to this file, `node1,node2,...` all here.

Jobs lie in $FAKE_SLURM/<id>: their script's process id in `pid`, their state (RUNNING, COMPLETED, FAILED) in `state`.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

JOBS = Path(os.environ["FAKE_SLURM"])


def sbatch(script: str) -> int:
    """Start the job in the background; the directives that matter here are --nodes and --output."""
    number = str(1 + len(list(JOBS.iterdir())))
    folder = JOBS / number
    folder.mkdir()
    (folder / "script").write_text(Path(script).read_text())  # Slurm runs the script as it was when it was submitted
    (folder / "state").write_text("PENDING")
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    subprocess.Popen([sys.executable, __file__, "job", number], start_new_session=True, **quiet)
    print(f"Submitted batch job {number}")
    return 0


def job(number: str) -> int:
    """Run the script, again while it asks to be requeued."""
    folder = JOBS / number
    lines = (folder / "script").read_text().splitlines()
    given = dict(
        line.removeprefix("#SBATCH --").split("=", 1) for line in lines if line.startswith("#SBATCH --") and "=" in line
    )
    nodes = ",".join(f"node{index + 1}" for index in range(int(given["nodes"])))
    log = given["output"].replace("%x", given["job-name"]).replace("%j", number)
    restarts = 0
    while True:
        environment = {**os.environ, "SLURM_JOB_ID": number, "SLURM_JOB_NODELIST": nodes}
        if restarts:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        with open(log, "ab") as output:
            process = subprocess.Popen(["bash", folder / "script"], stdout=output, stderr=output, env=environment)
            (folder / "pid").write_text(str(process.pid))
            (folder / "state").write_text("RUNNING")
            code = process.wait()
        if not (folder / "requeue").exists():
            (folder / "state").write_text("FAILED" if code else "COMPLETED")
            return code
        (folder / "requeue").unlink()
        restarts += 1


def srun(*words: str) -> int:
    """One task a node of --nodelist, each with a core of its own; signals go to all of them."""
    options = dict(word.removeprefix("--").split("=", 1) for word in words if word.startswith("--") and "=" in word)
    command = list(words[next(i for i, word in enumerate(words) if not word.startswith("--")) :])
    cores, tasks = sorted(os.sched_getaffinity(0)), []
    for index, node in enumerate(options["nodelist"].split(",")):
        file = options["output"].replace("%N", node).replace("%t", str(index))
        core = {"VLLM_CPU_OMP_THREADS_BIND": str(cores[index % len(cores)])}
        with open(file, "ab") as output:
            tasks.append(subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **core}))
    for number in (signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, _: [task.send_signal(number) for task in tasks])
    return max(abs(task.wait()) for task in tasks)


def scontrol(what: str, *words: str) -> int:
    if what == "show":
        print("\n".join(words[1].split(",")))
    else:
        (JOBS / words[0] / what).touch()
    return 0


if __name__ == "__main__":
    name, *arguments = [Path(sys.argv[0]).name, *sys.argv[1:]] if not sys.argv[0].endswith(".py") else sys.argv[1:]
    sys.exit({"sbatch": sbatch, "job": job, "srun": srun, "scontrol": scontrol}[name](*arguments))
