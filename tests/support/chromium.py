"""A headless Chromium that tests drive through its DevTools pipe: windows of any size, real input, screenshots.

The messages are those of the Chrome DevTools Protocol (chromedevtools.github.io/devtools-protocol), JSON
with a zero byte behind each, over file descriptors 3 and 4 (--remote-debugging-pipe).
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-pipe",
)  # fmt: skip
PATH = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TIMEOUT = 120.0


class Chromium:
    """One browser with one tab. Every request on the network is refused and remembered in ``requests``."""

    def __init__(self, profile: Path) -> None:
        assert PATH is not None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        # Out of the way of 3 and 4, which they become in the browser.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser, from_browser)]
        os.close(to_browser)
        os.close(from_browser)
        actions = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
        actions += [(os.POSIX_SPAWN_DUP2, end, fd) for end, fd in zip(ends, (3, 4), strict=True)]
        arguments = [PATH, *FLAGS, f"--user-data-dir={profile}", "about:blank"]
        self._pid = os.posix_spawn(PATH, arguments, os.environ, file_actions=actions)
        for end in ends:
            os.close(end)
        self._buffer, self._number = b"", 0
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Sends one command and returns its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT
        while b"\0" not in self._buffer:
            left = until - time.monotonic()
            ready, _, _ = select.select([self._in], [], [], max(left, 0.0))
            read = os.read(self._in, 1 << 16) if ready else b""
            assert read, "Chromium ended" if ready else f"Chromium said nothing for {TIMEOUT} s"
            self._buffer += read
        message, self._buffer = self._buffer.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path, width: int, height: int, *, fragment: str = "", dark: bool = False) -> None:
        """Loads a file in a window of this size and waits until its script is done or has failed."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 700
        )
        self.send("Page.navigate", url="about:blank")
        self.events.clear()
        self.send("Page.navigate", url=f"{path.as_uri()}{'#' + fragment if fragment else ''}")
        wait = """new Promise((done) => {
            const look = () => {
                const { state, errors } = document.documentElement?.dataset ?? {};
                if (location.protocol === "file:" && (state === "ready" || errors)) done(true);
                else setTimeout(look, 20);
            };
            look();
        })"""
        self.run(wait)

    def run(self, script: str) -> Any:
        """The value of an expression in the page; an exception there is one here."""
        found = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self) -> None:
        """Waits for two frames."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def data(self) -> dict[str, str]:
        """The data attributes of the root element."""
        return self.run("({...document.documentElement.dataset})")

    def problems(self) -> list[str]:
        """Exceptions, entries of the log, and requests other than for the file, since the last page was opened."""
        self.run("0")
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif method == "Log.entryAdded" or (method == "Runtime.consoleAPICalled" and params["type"] == "error"):
                found.append(str(params))
            elif method == "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "about:")):
                    found.append(f"request for {url}")
        return found

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        """Writes a PNG of the whole page or of the window."""
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """"mouseMoved", "mousePressed", "mouseReleased" or "mouseWheel", in pixels of the window."""
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def press(self, key: str, text: str = "") -> None:
        """A key, down and up."""
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def close(self) -> None:
        """Ends the browser."""
        try:
            self._session = None
            self.send("Browser.close")
        except (AssertionError, OSError):
            os.kill(self._pid, signal.SIGKILL)
        finally:
            os.waitpid(self._pid, 0)
            os.close(self._out)
            os.close(self._in)
