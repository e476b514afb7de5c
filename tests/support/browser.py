# SPDX-License-Identifier: Apache-2.0
"""A headless Chromium (Debian's package `chromium`), driven by its DevTools protocol."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

SECONDS = 120.0
"""A deadline for what the page does, not a wait: machines are busy."""


class PageError(AssertionError):
    """Raised when the page throws, or does not come to what is waited for."""


class Page:
    """A tab, and what was heard of it."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._number = 0
        self.requests: list[str] = []
        """The addresses that it asked for."""
        self.problems: list[str] = []
        """Exceptions that nobody caught, and what was refused by the policy."""
        for domain in ("Page", "Runtime", "Network", "Log", "DOM"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            heard = json.loads(self._socket.recv(SECONDS))
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise PageError(f"{method}: {heard['error']}")
                result: dict[str, Any] = heard["result"]
                return result
            self._hear(heard)

    def _hear(self, heard: dict[str, Any]) -> None:
        method, said = heard.get("method"), heard.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(said["request"]["url"])
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(said["exceptionDetails"])[:2000])
        if method == "Log.entryAdded" and said["entry"]["source"] == "security":
            self.problems.append(said["entry"]["text"])

    def evaluate(self, expression: str) -> Any:
        """Return what an expression is, as JSON; a promise is waited for."""
        made = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in made:
            raise PageError(f"{expression}: {json.dumps(made['exceptionDetails'])[:2000]}")
        return made["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + SECONDS
        while not self.evaluate(f"!!({condition})"):
            if time.monotonic() > deadline:
                said = self.evaluate("document.body?.innerText?.slice(0, 3000)")
                raise PageError(f"never came: {condition}\n{said}\n{self.problems}")
            time.sleep(0.05)

    def open(self, url: str, ready: str = "document.body?.dataset.ready === 'true'") -> None:
        """Go to an address, as if it was the first time."""
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href === 'about:blank'")
        self.requests.clear()
        self.problems.clear()
        self.call("Page.navigate", url=url)
        self.wait(f"location.protocol !== 'about:' && ({ready})")

    def fill(self, name: str, value: str | bool) -> None:
        """Put a value into a field, by its id."""
        key = "checked" if isinstance(value, bool) else "value"
        self.evaluate(
            f"(() => {{ const one = document.getElementById({json.dumps(name)});"
            f"one.{key} = {json.dumps(value)};"
            "for (const kind of ['input', 'change']) one.dispatchEvent(new Event(kind)); })()"
        )

    def click(self, selector: str) -> None:
        """Click an element, and wait until its panel's work is done."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).click()")
        self.settle()

    def settle(self) -> None:
        """Wait until no panel is at work."""
        self.wait("!document.querySelector('[aria-busy]')")

    def press(self, key: str, times: int = 1) -> None:
        """Press a key."""
        codes = {"Enter": 13, "Tab": 9, " ": 32, "ArrowLeft": 37, "ArrowRight": 39}
        codes |= {"ArrowUp": 38, "ArrowDown": 40, "Home": 36}
        text = {"Enter": "\r", " ": " "}.get(key, "")
        common = {"key": key, "code": key, "windowsVirtualKeyCode": codes[key]}
        for _ in range(times):
            self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
            self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text: str) -> None:
        """Type text into what has the focus."""
        self.call("Input.insertText", text=text)

    def view(self, width: int, height: int = 900, dark: bool = False, scale: int = 1) -> None:
        """Set the window's size in CSS pixels, and what colours it prefers."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=scale, mobile=False,
        )  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def picture(self, path: Path, selector: str | None = None) -> None:
        """Write a PNG of an element, or of the whole page."""
        time.sleep(0.3)  # for what is drawn when sizes change
        box = self.evaluate(
            "(() => { const r = " + (f"document.querySelector({json.dumps(selector)})"
            if selector else "document.documentElement") + ".getBoundingClientRect();"
            "return {x: r.x + scrollX, y: r.y + scrollY, width: r.width, height: r.height}; })()"
        )  # fmt: skip
        made = self.call(
            "Page.captureScreenshot", captureBeyondViewport=True, clip={**box, "scale": 1}
        )
        path.write_bytes(base64.b64decode(made["data"]))


def chromium() -> str:
    """Return the program; RuntimeError with what to do where there is none."""
    if found := shutil.which("chromium"):
        return found
    raise RuntimeError("these tests drive a real browser: `apt-get install chromium`")


@contextmanager
def browser(*options: str) -> Iterator[Callable[[], Page]]:
    """A Chromium that reaches nothing but this machine; gives out a function that opens tabs."""
    # Its helpers may still write while the folder is removed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [
                chromium(), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                "--disable-dev-shm-usage", "--disable-background-networking",
                "--disable-component-update", "--disable-sync", "--hide-scrollbars",
                "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
                "--remote-debugging-port=0", "--remote-allow-origins=*",
                f"--user-data-dir={profile}", *options, "about:blank",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        sockets: list[ClientConnection] = []
        try:
            found = Path(profile) / "DevToolsActivePort"
            deadline = time.monotonic() + SECONDS
            while not (found.exists() and len(found.read_text().splitlines()) == 2):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("chromium did not start")
                time.sleep(0.05)
            port, path = found.read_text().splitlines()
            whole = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, open_timeout=SECONDS)
            sockets.append(whole)

            def tab() -> Page:
                asked = {"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}}
                whole.send(json.dumps(asked))
                while "result" not in (heard := json.loads(whole.recv(SECONDS))):
                    pass
                target = heard["result"]["targetId"]
                address = f"ws://127.0.0.1:{port}/devtools/page/{target}"
                sockets.append(connect(address, max_size=None, open_timeout=SECONDS))
                return Page(sockets[-1])

            yield tab
        finally:
            for socket in sockets:
                socket.close()
            process.terminate()
            process.wait()
