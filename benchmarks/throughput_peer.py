"""Something that runs beside throughput.py, in a process of its own: both ends of the talk.

A line in asks for work, a JSON line answers; between two asks the process waits, so that runs can alternate.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Peer:
    """The process of a script of this folder. first: its first answer, once it is ready.

    Raises RuntimeError with the end of what it wrote to stderr where it ends or does not answer with JSON.
    """

    def __init__(self, python: str, script: str, arguments: Sequence[str] = ()) -> None:
        self.script, self.errors = script, tempfile.TemporaryFile("w+")
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
        self.process = subprocess.Popen(
            [python, str(HERE / script), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env={**os.environ, **threads},
        )
        self.first = self.hear()

    def ask(self, line: str) -> dict[str, Any]:
        """The answer to a line."""
        self.tell(line)
        return self.hear()

    def tell(self, line: str) -> None:
        """Ask, and leave the answer to `hear`."""
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """The next answer."""
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait()
            self.errors.seek(0)
            raise RuntimeError(f"{self.script} ended ({code}):\n{self.errors.read()[-2000:]}")
        return json.loads(line)

    def close(self) -> None:
        """End the process: it ends itself when its input does."""
        self.process.stdin.close()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.errors.close()


class Line:
    """The other end: answers on what was stdout; whatever else is printed there goes to stderr."""

    def __init__(self) -> None:
        self.out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **answer: Any) -> None:
        self.out.write(json.dumps(answer) + "\n")

    def asks(self) -> Iterator[str]:
        """Lines, until the other end closes."""
        return iter(sys.stdin.readline, "")
