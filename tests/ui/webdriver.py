"""Client of chromedriver in the standard library: the part of WebDriver that the tests of the status page need."""

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
# Timeout in seconds after which a program counts as stopped.
PATIENCE = 60


class Problem(Exception):
    """Error of chromedriver for a failed command."""


class Browser:
    """Headless Chromium with a separate profile."""

    def __init__(self):
        self.profile = tempfile.mkdtemp(prefix="draftmill-ui-")
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            self.url = f"http://127.0.0.1:{self._port()}"
            options = {"args": FLAGS + [f"--user-data-dir={self.profile}"]}
            always = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
            session = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": always}})
            self.url += f"/session/{session['sessionId']}"
        except BaseException:
            self.driver.kill()
            raise

    def _port(self):
        for line in self.driver.stdout:
            found = re.search(r"started successfully on port (\d+)", line)
            if found:
                threading.Thread(target=self.driver.stdout.read, daemon=True).start()
                return int(found.group(1))
        raise Problem("chromedriver ended before it said its port")

    def _ask(self, method, path, body=None):
        data = None if method == "GET" else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + path, data=data, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise Problem(json.load(error)["value"]["message"].split("\n")[0]) from None

    def open(self, url):
        self._ask("POST", "/url", {"url": url})

    def script(self, text, *arguments):
        """Runs the body of a function in the page and returns its result."""
        return self._ask("POST", "/execute/sync", {"script": text, "args": list(arguments)})

    def find(self, selector):
        return self._ask("POST", "/element", {"using": "css selector", "value": selector})[ELEMENT]

    def click(self, selector):
        self._ask("POST", f"/element/{self.find(selector)}/click")

    def type(self, selector, text):
        self._ask("POST", f"/element/{self.find(selector)}/value", {"text": text})

    def press(self, key):
        """Presses and releases a key, for example "\\ue004" (tab)."""
        actions = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self._ask("POST", "/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def emulate(self, width, height, dark):
        """Sets the size of the screen, and light or dark."""
        phone = width < 600
        metrics = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.devtools("Emulation.setDeviceMetricsOverride", metrics)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.devtools("Emulation.setEmulatedMedia", {"features": scheme})

    def devtools(self, command, parameters):
        return self._ask("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def picture(self, path, whole=False):
        """Takes a picture of the screen, or of the whole page."""
        shot = self.devtools("Page.captureScreenshot", {"captureBeyondViewport": whole} | self._clip(whole))
        with open(path, "wb") as file:
            file.write(base64.b64decode(shot["data"]))

    def _clip(self, whole):
        if not whole:
            return {}
        size = self.devtools("Page.getLayoutMetrics", {})["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}

    def log(self):
        """Returns new console messages of the page and its network."""
        return self._ask("POST", "/se/log", {"type": "browser"})

    def close(self):
        try:
            self._ask("DELETE", "")
        except (Problem, OSError):
            pass
        self.driver.terminate()
        try:
            self.driver.wait(10)
        except subprocess.TimeoutExpired:
            self.driver.kill()
        shutil.rmtree(self.profile, ignore_errors=True)


def wait(what, condition, seconds=PATIENCE):
    """Waits until the condition returns a true value, and returns it."""
    deadline = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s in vain: {what}")
        time.sleep(0.1)
