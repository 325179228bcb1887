"""Control a headless Chromium through its DevTools pipe, without a driver or a package."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from contextlib import contextmanager
from itertools import count

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser():
    """Return the path of a Chromium; None if none is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page of a browser, with its errors and requests."""

    def __init__(self, to_browser, from_browser):
        self._to, self._from = to_browser, from_browser
        self._ids = count(1)
        self._pending = b""
        self._session = None
        self.complaints = []
        """Messages of the console and of the log, and exceptions."""
        self.requests = []
        """URLs that the page requested."""
        self._events = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def show(self, path, *, width=1000, height=800, dark=False, script=True):
        """Open a file, and wait until it is loaded."""
        self.complaints, self.requests = [], []
        self._call("Emulation.setScriptExecutionDisabled", value=not script)
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        self._call("Page.navigate", url=path.as_uri())
        while "Page.loadEventFired" not in self._events:
            self._read()
        # The answer comes after the layout, and after all messages about it.
        self._call("Page.getLayoutMetrics")

    def resize(self, width, height=800):
        self._call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def evaluate(self, expression):
        """Return the value of an expression, or the result of its promise."""
        answer = self._call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key, *, code, text=""):
        """Press a key; the focused element receives it."""
        keys = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        typed = {"text": text} if text else {}
        self._call("Input.dispatchKeyEvent", type="keyDown", **keys, **typed)
        self._call("Input.dispatchKeyEvent", type="keyUp", **keys)

    def screenshot(self, file, *, whole=True):
        data = self._call("Page.captureScreenshot", captureBeyondViewport=whole, format="png")
        file.write_bytes(base64.b64decode(data["data"]))

    def _call(self, method, **parameters):
        number = next(self._ids)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = self._read()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self):
        while b"\0" not in self._pending:
            chunk = os.read(self._from.fileno(), 1 << 20)
            assert chunk, "the browser has ended"
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\0")
        message = json.loads(line)
        method, parameters = message.get("method", ""), message.get("params", {})
        self._events.append(method)
        if method in {"Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"}:
            self.complaints.append(json.dumps(parameters)[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        return message


@contextmanager
def opened_browser(profile):
    """Start a browser for the block, and yield a page of it.

    Args:
        profile: A directory for the browser's files.
    """
    browser_reads, to_browser = os.pipe()
    from_browser, browser_writes = os.pipe()

    def place():
        # The browser reads commands from descriptor 3, and answers on 4.
        os.dup2(browser_reads, 103)
        os.dup2(browser_writes, 104)
        os.dup2(103, 3)
        os.dup2(104, 4)

    process = subprocess.Popen(
        [
            find_browser(),
            "--headless=new",
            "--remote-debugging-pipe",
            # Containers have no user namespaces; the tests' pages are trusted.
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--hide-scrollbars",
            "--no-first-run",
            f"--user-data-dir={profile}",
        ],
        preexec_fn=place,  # noqa: PLW1509  # nothing else runs yet in a test
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(browser_reads)
    os.close(browser_writes)
    try:
        with os.fdopen(to_browser, "wb") as writing, os.fdopen(from_browser, "rb") as reading:
            yield Page(writing, reading)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
