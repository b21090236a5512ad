"""The ways a run shows itself: plain lines, a panel that redraws itself on a terminal, or JSON lines for programs."""
