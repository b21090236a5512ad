"""What is said of a process that ends without a word of its own: killed, out of memory, or crashed in native code."""

from __future__ import annotations

import contextlib
import subprocess

_SHOW_CURSOR = "\033[?25h\n"
_SCRIPT = 'while IFS= read -r line; do [ -n "$line" ] || exit 0; words=$line; done; printf "%s%s\\n" "$0" "$words"'
_PATIENCE_S = 5


class LastWords:
    """A small shell that waits for this process's end and then writes the newest `words` to the descriptor `errors`.

    On a terminal the cursor comes back too.
    """

    def __init__(self, errors: int, is_terminal: bool) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _SCRIPT, _SHOW_CURSOR if is_terminal else ""],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=errors,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # out of Ctrl-C's reach
        )

    def will_be(self, words: str) -> None:
        """The words from now on; with "" for none the shell ends."""
        assert self._shell.stdin is not None
        with contextlib.suppress(OSError):  # somebody may have killed the shell
            self._shell.stdin.write(" ".join(words.split()).encode() + b"\n")

    def cancel(self) -> None:
        """This process speaks for itself from here on."""
        self.will_be("")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._shell.wait(_PATIENCE_S)
