"""The error that ends a ServerApp: one line in Flower's log, and a file for `cfl-run serve`, which reports it."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from cfl.core import Busy, CflError, CheckpointError, ConfigError, errors
from cfl.runtime.run_folder import read_json

ERROR = Path("flower", "error.json")  # in the run's folder
# a run that is merely continued meets them again; their texts say what helps
LASTING = (ConfigError, CheckpointError, Busy)


@contextmanager
def told(output: Path) -> Iterator[None]:
    """Write an error of `cfl` to the run's folder, `output`, and let Flower log it without a traceback."""
    logging.getLogger("flwr").addFilter(in_one_line)
    try:
        yield
    except CflError as error:
        with suppress(OSError):  # Flower still logs the error
            (output / ERROR).parent.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"error": type(error).__name__, "text": errors.reason(error)})
            (output / ERROR).write_text(text, encoding="utf-8")
        raise


def in_one_line(record: logging.LogRecord) -> bool:
    """Replace the traceback of an error of `cfl` in a record by the error's text. Returns True: the record is kept."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, CflError):
        record.msg, record.args, record.exc_info = errors.reason(error), (), None
    return True


def forget(output: Path) -> None:
    """Remove the error of an earlier ServerApp."""
    (output / ERROR).unlink(missing_ok=True)


def found(output: Path) -> CflError:
    """Return the error for a run that did not end. It names --resume where that can help."""
    error = read_json(output / ERROR, dict[str, str])
    kind = getattr(errors, error.get("error", ""), CflError)
    if issubclass(kind, LASTING):
        return ConfigError(error["text"]) if issubclass(kind, ConfigError) else CflError(error["text"])
    again = "continue it with --resume" if (output / "rounds.jsonl").exists() else "repeat the command"
    return CflError(f"the run in '{output}' stopped before its last round: {error.get('text', 'see above')}; {again}")
