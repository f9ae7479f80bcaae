"""A headless Chromium that a test drives over its debugging pipe.

Commands are JSON texts that end with a zero byte.
"""

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tests.missing_tools import get

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """A headless Chromium with one tab, and the errors that its page reported."""

    def __init__(self, folder: Path) -> None:
        if CHROMIUM is None:
            pytest.skip(get("chromium"))
        commands, self._commands = os.pipe()
        self._responses, responses = os.pipe()
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
        self._process = subprocess.Popen(  # Chromium reads commands from descriptor 3 and writes responses to 4
            [
                *("bash", "-c", f'exec "$@" 3<&{commands} 4>&{responses}', "bash", CHROMIUM, *options),
                *("--remote-debugging-pipe", f"--user-data-dir={folder}"),
            ],
            pass_fds=(commands, responses),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(commands)
        os.close(responses)
        self._read, self._number, self._session, self.errors = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.call("Page.enable")
        self.call("Runtime.enable")

    def call(self, method: str, **params):
        """Call a command of the debugging protocol, and return its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": params}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._commands, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next()
            if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(message["params"])
            if message.get("id") == self._number:
                assert "error" not in message, message["error"]
                return message["result"]

    def _next(self):
        while b"\0" not in self._read:
            part = os.read(self._responses, 2**16)
            assert part, "Chromium has ended"
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def evaluate(self, script: str):
        """Return the value of a JavaScript expression on the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait_for(self, script: str, seconds: float = 20):
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + seconds
        while not self.evaluate(script):
            assert time.monotonic() < deadline, script
            time.sleep(0.05)

    def open(self, url: str, *, width: int, height: int, scheme: str) -> None:
        """Show a page in a window of the given size, in the color scheme light or dark."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && document.URL !== 'about:blank'")

    def point_at(self, selector: str) -> None:
        """Scroll an element into view, and move the mouse to its middle."""
        x, y = self.evaluate(
            f"(() => {{ const one = document.querySelector({json.dumps(selector)});"
            "one.scrollIntoView({ block: 'center' }); const box = one.getBoundingClientRect();"
            "return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path) -> None:
        """Write a PNG of the window."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        """End Chromium."""
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._responses)
