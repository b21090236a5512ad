"""Rows of a jsonl file, each with the words that say where it stands. Knows no task."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grpo_lab.config import expand_path
from grpo_lab.errors import ConfigError


class Row(NamedTuple):
    """One record; `where` is its file and line for error messages."""

    where: str
    record: Mapping[str, Any]

    def text(self, key: str) -> str:
        """The string under `key`, a number as its digits. ConfigError when it is missing, of another kind, or blank."""
        if key not in self.record:
            raise ConfigError(
                f"{self.where}: no key {key!r}; the row has {', '.join(map(repr, self.record)) or 'none'}: add it"
            )
        value = self.record[key]
        if isinstance(value, int | float) and not isinstance(value, bool):
            return repr(value)
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{self.where}: {key!r} must be a non-empty string, got {repr(value)[:80]}; correct the row"
            )
        return value


def find_file(path: str, name: str) -> Path:
    """`path` itself if it is a file, or the file `name` in the folder it is. `~` and `$VARIABLES` are expanded."""
    found = Path(expand_path(path))
    found = found / name if found.is_dir() else found
    if not found.is_file():
        raise ConfigError(
            f"data.path={path!r}: no file {str(found)!r}; give a jsonl file or a folder that holds {name}"
        )
    return found


def read_rows(file: Path) -> Iterator[Row]:
    """The rows of a jsonl file, blank lines skipped; ConfigError for a bad file or a line that is no object."""
    try:
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield _row(f"{file}, line {number}", line)
    except OSError as error:
        raise ConfigError(f"cannot read {str(file)!r}: {error.strerror}; check data.path") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text ({error.reason}); save it as UTF-8") from None


def _row(where: str, line: str) -> Row:
    try:
        record = json.loads(line)
        if "\\ud" in line.lower():  # half of a surrogate pair is no text: tokenizers and parquet refuse it
            json.dumps(record, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{where}: half of a surrogate pair (\\ud800 to \\udfff alone); correct the row") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not valid JSON ({error}); each line must be one JSON object") from None
    if not isinstance(record, dict):
        raise ConfigError(f"{where}: a {type(record).__name__} where a JSON object is expected, like {{...}}")
    return Row(where, record)
