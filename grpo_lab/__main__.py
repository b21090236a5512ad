"""`python -m grpo_lab` and the `grpo-lab` script: the stop signals first, since even the imports take a moment."""

import signal

from grpo_lab.signals import STOP_SIGNALS, leave


def main() -> None:
    """See cli.main."""
    for number in STOP_SIGNALS:
        signal.signal(number, leave)
    from grpo_lab import cli

    cli.main()


if __name__ == "__main__":
    main()
