"""A headless Chromium, driven over a pipe by its DevTools protocol."""

import json
import os
import select
import shutil
import subprocess
import time

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROGRAM = next(filter(None, map(shutil.which, NAMES)), None)
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --disable-dev-shm-usage --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync --remote-debugging-pipe"
).split()


class Browser:
    """One page of a browser. events: reported events so far, as pairs of method and parameters."""

    def __init__(self, program, profile):
        theirs, self._to = os.pipe()
        self._from, answers = os.pipe()

        def descriptors():  # Chromium reads commands at 3 and writes answers at 4
            high = os.dup(theirs), os.dup(answers)
            spare = [os.dup(end) for end in high]  # numbers above 4, even if `high` has lower ones
            for end, number in zip(spare, (3, 4), strict=True):
                os.dup2(end, number)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            close_fds=False,
            preexec_fn=descriptors,
        )
        os.close(theirs)
        os.close(answers)
        self._rest, self._number, self._session, self.events = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def open(self, url, width, height=800):
        """Load a page in a window of this size in CSS pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.call("Page.navigate", url=url)
        while "Page.loadEventFired" not in [name for name, _ in self.events]:
            self._next()

    def value(self, expression):
        """Evaluate a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def close(self):
        """Close the browser."""
        self._process.terminate()
        self._process.wait(timeout=20)
        os.close(self._to)
        os.close(self._from)

    def _next(self):
        limit = time.monotonic() + 60
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0, limit - time.monotonic()))
            assert ready, "the browser does not answer"
            got = os.read(self._from, 1 << 16)
            assert got, "the browser has ended"
            self._rest += got
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if "method" in message:
            self.events.append((message["method"], message["params"]))
        return message
