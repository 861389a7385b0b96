"""A headless Chromium, spoken to over its DevTools protocol by two pipes: no port, no socket, no library.

`find()` says where one is: MEMOPT_CHROMIUM, else what is on the path. Debian: apt-get install chromium."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
SECONDS = 600  # for any one answer: far above what it takes on a machine that is busy with other things


def find() -> str | None:
    if named := os.environ.get("MEMOPT_CHROMIUM"):
        return named
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Chromium:
    """One process. Messages that are no answers are kept in `heard`, in order."""

    def __init__(self, binary: str, profile: str) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # The browser reads from 3 and writes to 4: out of the way of those first.
        theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (to_read, to_write)]
        os.close(to_read)
        os.close(to_write)

        def in_child() -> None:
            os.dup2(theirs[0], 3)
            os.dup2(theirs[1], 4)

        self._log = open(Path(profile) / "log", "w+")  # noqa: SIM115 (as long as the process)
        self._process = subprocess.Popen(
            [
                binary,
                "--headless=new",
                "--remote-debugging-pipe",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-background-timer-throttling",
                "--disable-backgrounding-occluded-windows",
                "--disable-renderer-backgrounding",
                "--disable-component-update",
                "--no-first-run",
                "--force-color-profile=srgb",
                "--hide-scrollbars",
                f"--user-data-dir={profile}",
                "about:blank",
            ],
            pass_fds=(3, 4),
            preexec_fn=in_child,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        for end in theirs:
            os.close(end)
        self._numbers = itertools.count(1)
        self._rest = b""
        self.heard: list[dict[str, Any]] = []

    def close(self) -> None:
        with contextlib.suppress(OSError, EOFError, TimeoutError):
            self.call("Browser.close", seconds=10)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        os.close(self._write)
        self._log.close()

    def _message(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise TimeoutError("the browser does not answer")
            if not (more := os.read(self._read, 1 << 20)):
                self._log.seek(0)
                raise EOFError(f"the browser ended: {self._log.read()[-2000:]}")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def call(
        self, method: str, session: str | None = None, seconds: float = SECONDS, **params: Any
    ) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        content = json.dumps(message).encode() + b"\0"
        while content:
            content = content[os.write(self._write, content) :]
        until = time.monotonic() + seconds
        while True:
            answer = self._message(until)
            if answer.get("id") != number:
                self.heard.append(answer)
            elif "error" in answer:
                raise RuntimeError(f"{method}: {answer['error']}")
            else:
                return answer["result"]

    def tab(self, width: int = 1200, height: int = 900, *, dark: bool = False) -> Tab:
        return Tab(self, width, height, dark)


class Tab:
    """One page. Offline from the first moment; what it says and asks for is kept."""

    def __init__(self, browser: Chromium, width: int, height: int, dark: bool) -> None:
        self._browser = browser
        self._target = browser.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = browser.call("Target.attachToTarget", targetId=self._target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=-1,
            uploadThroughput=-1,
        )
        self.resize(width, height)
        scheme = "dark" if dark else "light"
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def close(self) -> None:
        self._browser.call("Target.closeTarget", targetId=self._target)

    def resize(self, width: int, height: int) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def open(self, path: Path) -> None:
        """Returns when the page says that it is drawn, or that it cannot be."""
        answer = self.call("Page.navigate", url=path.resolve().as_uri())
        if "errorText" in answer:
            raise FileNotFoundError(f"{path}: {answer['errorText']}")
        self.wait(
            "document.readyState === 'complete' && (document.documentElement.dataset.drawn === 'yes' || "
            "document.getElementById('trouble')?.hidden === false)"
        )

    def wait(self, condition: str) -> None:
        until = time.monotonic() + SECONDS
        while not self.evaluate(condition):
            if time.monotonic() > until:
                raise TimeoutError(f"never came true: {condition}; {self.said()}")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, or what its promise becomes."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression[:200]}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def _heard(self, *methods: str) -> Iterator[dict[str, Any]]:
        for message in self._browser.heard:
            if message.get("sessionId") == self._session and message["method"] in methods:
                yield message["params"]

    def said(self) -> list[str]:
        """The console's messages, with the browser's errors and warnings."""
        found = [json.dumps(p.get("args", p)) for p in self._heard("Runtime.consoleAPICalled")]
        found += [json.dumps(p["exceptionDetails"]) for p in self._heard("Runtime.exceptionThrown")]
        return found + [json.dumps(p["entry"]) for p in self._heard("Log.entryAdded")]

    def requested(self) -> list[str]:
        return [p["request"]["url"] for p in self._heard("Network.requestWillBeSent")]

    def mouse(self, kind: str, x: float, y: float, button: str = "none") -> None:
        clicks = 1 if button != "none" else 0
        self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, clickCount=clicks, buttons=clicks
        )

    def click(self, x: float, y: float) -> None:
        self.drag(x, y, x, y)

    def drag(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.mouse("mouseMoved", x0, y0)
        self.mouse("mousePressed", x0, y0, "left")
        for part in range(1, 6) if (x0, y0) != (x1, y1) else ():
            self.call(
                "Input.dispatchMouseEvent",
                type="mouseMoved",
                x=x0 + (x1 - x0) * part / 5,
                y=y0 + (y1 - y0) * part / 5,
                button="left",
                buttons=1,
            )
        self.mouse("mouseReleased", x1, y1, "left")

    def key(self, name: str, text: str = "") -> None:
        """Press a key, by its name in the events of a page ("Tab", "ArrowLeft", "p")."""
        text = text or (name if len(name) == 1 else {"Enter": "\r"}.get(name, ""))
        code = {"Tab": 9, "Enter": 13, "PageUp": 33, "PageDown": 34, "End": 35, "Home": 36, "ArrowLeft": 37}
        code |= {"ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "Escape": 27}
        number = code.get(name) or ord(name.upper())
        for kind in ("keyDown" if text else "rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, text=text, windowsVirtualKeyCode=number)

    def screenshot(self, *, whole: bool = True) -> bytes:
        """A PNG of the page, or of what the window shows of it."""
        return base64.b64decode(
            self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        )

    def box(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height in the window, brought into its middle."""
        found = self.evaluate(
            f"((found) => {{ found.scrollIntoView({{ block: 'center' }}); "
            "const { left, top, width, height } = found.getBoundingClientRect(); "
            f"return [left, top, width, height]; }})(document.querySelector({json.dumps(selector)}))"
        )
        return tuple(found)

    def colours(self, png: bytes, box: tuple[float, float, float, float] | None = None) -> dict[str, int]:
        """The number of a picture's pixels by colour ("#rrggbb"), as the browser reads the file."""
        picture = base64.b64encode(png).decode()
        crop = "[0, 0, image.width, image.height]" if box is None else json.dumps([round(n) for n in box])
        return self.evaluate(
            f"""(async () => {{
                const bytes = Uint8Array.from(atob("{picture}"), (letter) => letter.charCodeAt(0));
                const image = await createImageBitmap(new Blob([bytes], {{ type: "image/png" }}));
                const canvas = document.createElement("canvas");
                canvas.width = image.width; canvas.height = image.height;
                const context = canvas.getContext("2d");
                context.drawImage(image, 0, 0);
                const counts = {{}};
                const {{ data }} = context.getImageData(...{crop});
                for (let i = 0; i < data.length; i += 4) {{
                    const hex = "#" + [0, 1, 2].map((k) => data[i + k].toString(16).padStart(2, "0")).join("");
                    counts[hex] = (counts[hex] ?? 0) + 1;
                }}
                return counts;
            }})()"""
        )


@contextlib.contextmanager
def running() -> Iterator[Chromium]:
    binary = find()
    if binary is None:
        raise FileNotFoundError("there is no Chromium: install it, or name one in MEMOPT_CHROMIUM")
    with tempfile.TemporaryDirectory(prefix="memopt-chromium-", ignore_cleanup_errors=True) as profile:
        browser = Chromium(binary, profile)
        try:
            yield browser
        finally:
            browser.close()


def for_tests() -> Iterator[Chromium]:
    """Yield a running browser; where none is or none starts, the tests are skipped, which says so."""
    import pytest  # the benchmarks use this file without it

    if find() is None:
        pytest.skip("there is no Chromium (apt-get install chromium, or name one in MEMOPT_CHROMIUM)")
    with contextlib.ExitStack() as open_:
        try:
            browser = open_.enter_context(running())
            browser.call("Browser.getVersion")
        except (OSError, EOFError) as error:
            pytest.skip(f"Chromium does not start here: {error}")
        yield browser
