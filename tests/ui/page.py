#!/usr/bin/env python3
"""Tests of the status page in a real headless Chromium, on real runs of `draftmill train` with simulated engines.

    make test-ui

Everything is on loopback. Each check waits for a condition, never for a time.
"""

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import traceback
import urllib.error
import urllib.request

from webdriver import Browser, wait

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
HERE = os.path.join(ROOT, "tests", "ui")
TARGET = os.environ.get("CARGO_TARGET_DIR", os.path.join(ROOT, "target"))
DRAFTMILL = os.environ.get("DRAFTMILL", os.path.join(TARGET, "debug", "draftmill"))
# All tests together.
LONGEST = 175
TAB, ENTER = "\ue004", "\ue007"
SCREENS = [(1600, 1000), (1280, 800), (768, 1024), (390, 844), (320, 640)]


def need_browser():
    """Installs Chromium and its driver if they are missing and this user may."""
    missing = [name for name in ("chromium", "chromedriver") if not shutil.which(name)]
    if not missing:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        sys.exit(f"draftmill: {' and '.join(missing)} missing; install the packages chromium and chromium-driver")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update"], ["install", "-y", "--no-install-recommends", "chromium", "chromium-driver"]):
        subprocess.run(["apt-get", "-qq", *command], check=True, env=environment, stdout=subprocess.DEVNULL)


class Run:
    """A run of `draftmill train` in a temporary folder."""

    def __init__(self, *sets):
        self.folder = tempfile.mkdtemp(prefix="draftmill-ui-")
        self.sets = list(sets)
        self.config = shutil.copy(os.path.join(HERE, "run.toml"), self.folder)
        self.process = self.address = None
        self._draftmill("prepare").communicate()

    def _draftmill(self, command, *more):
        arguments = [DRAFTMILL, command, "--config", self.config]
        for setting in (f"run.dir={self.folder}/run", *self.sets, *more):
            arguments += ["--set", setting]
        return subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def start(self):
        """Starts training, on the same port as before."""
        port = [f"admin.listen={self.address}"] if self.address else []
        self.process = self._draftmill("train", *port)
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            found = re.search(r"http://(127\.0\.0\.1:\d+)", line)
            if found:
                self.address = found.group(1)
                threading.Thread(target=self.process.stderr.read, daemon=True).start()
                return
        raise AssertionError("the run ended: " + "".join(lines))

    def edit(self, old, new):
        """Replaces the configuration file, as an editor does."""
        with open(self.config, encoding="utf-8") as file:
            text = file.read()
        assert old in text, old
        with open(self.config + ".new", "w", encoding="utf-8") as file:
            file.write(text.replace(old, new))
        os.replace(self.config + ".new", self.config)

    def kill(self):
        self.process.kill()
        self.process.wait()

    def get(self, path):
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=30) as answer:
            return answer.read().decode()

    def status(self):
        return json.loads(self.get("/status"))

    def close(self):
        if self.process:
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


# === expected texts, derived independently from the status ===


def whole(value):
    return f"{round(value):,}".replace(",", "\u202f")


def share(value):
    return f"{js_fixed(value * 100, 0)}\u202f%"


def js_fixed(value, digits):
    """JavaScript's rounding: from the exact value, halves up."""
    from decimal import ROUND_HALF_UP, Decimal

    return str(Decimal(value).quantize(Decimal(1).scaleb(-digits), rounding=ROUND_HALF_UP))


def size(value):
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= unit:
            number = value / unit
            return f"{js_fixed(number, 2 if number < 10 else 1 if number < 100 else 0)} {name}"
    return f"{whole(value)} B"


def duration(seconds):
    s = max(0, round(seconds))
    if s < 60:
        return f"{s} s"
    if s < 3600:
        return f"{s // 60} min {s % 60} s"
    if s < 86400:
        return f"{s // 3600} h {s // 60 % 60} min"
    return f"{s // 86400} d {s // 3600 % 24} h"


def expected(status):
    """Expected texts of the page by CSS selector."""
    texts = {"#sentence": status["sentence"], "[data-key='run.dir']": status["run"]["dir"]}
    integers = "progress.step progress.planned_steps progress.epochs jobs.trained jobs.skipped jobs.returned queue.jobs queue.padded"
    integers += " queue.stragglers pool.batches pool.max_batches training.tokens_per_second training.extracted_tokens_per_second"
    sizes = "pool.bytes pool.reserved_bytes pool.checked_out_bytes pool.max_bytes"
    for key in integers.split() + sizes.split():
        section, name = key.split(".")
        texts[f"[data-key='{key}']"] = (whole if key in integers else size)(status[section][name])
    eta = status["progress"]["eta"]
    texts["[data-key='progress.eta']"] = "–" if eta is None else duration(eta)
    texts["[data-key='progress.epoch']"] = whole(status["progress"]["epoch"] + 1)
    training, pool = status["training"], status["pool"]
    if training["loss"] is not None:
        texts["[data-key='training.loss']"] = js_fixed(training["loss"], 3)
        texts["[data-key='training.leading_run']"] = js_fixed(training["leading_run"], 2)
        texts["[data-key='training.accuracy']"] = f"{js_fixed(training['accuracy'] * 100, 1)}\u202f%"
    texts["#pool-bytes"] = size(pool["bytes"] + pool["reserved_bytes"] + pool["checked_out_bytes"])
    places = {"target": 0, "drafter": 0}
    for actor in status["actors"]:
        if actor["actor"] in places:
            places[actor["actor"]] += 1
            row = f"#{actor['actor']}s tbody:nth-of-type({places[actor['actor']]}) tr:first-child"
            texts[f"{row} th"] = str(actor["index"])
            texts[f"{row} td:nth-of-type(2)"] = share(actor["busy"])
            texts[f"{row} td:nth-of-type(3)"] = whole(actor["tokens_per_second"])
    for place, bucket in enumerate(pool["buckets"], 1):
        row = f"#lengths tbody tr:nth-child({place})"
        texts[f"{row} th"] = whole(bucket["longest"])
        texts[f"{row} td:nth-of-type(2)"] = whole(bucket["batches"])
        texts[f"{row} td:nth-of-type(3)"] = whole(bucket["drawn"])
    texts["#faults .text"] = status["faults"][-1]["text"] if status["faults"] else None
    texts["#reloads .text"] = status["config"]["reloads"][-1]["text"] if status["config"]["reloads"] else None
    return texts


READ = """
const texts = {};
for (const place of arguments[0]) {
  const found = [...document.querySelectorAll(place)].map((element) => element.textContent);
  texts[place] = found.length ? found[0] : null;
  if (place.includes("data-key") && found.some((text) => text !== found[0])) texts[place] = found;
}
return texts;
"""


class Tests:
    """Ordered checks: each starts from the state that the one before left."""

    def __init__(self, browser, run):
        self.browser, self.run = browser, run

    def text(self, place):
        return self.browser.script("return document.querySelector(arguments[0])?.textContent ?? ''", place)

    def drawn(self):
        return self.browser.script("return document.body.dataset.event")

    def shows_the_status(self):
        """Waits until the page equals /status, read before and after the page without a change between."""
        different = {}

        def same():
            before = self.run.status()
            wanted = expected(before)
            shown = self.browser.script(READ, list(wanted))
            after = self.run.status()
            different.clear()
            different.update({place: (wanted[place], shown[place]) for place in wanted if wanted[place] != shown[place]})
            steady = all(before[key] == after[key] for key in before if key != "at")
            return steady and not different

        try:
            wait("the page equals /status", same, 30)
        except AssertionError as error:
            raise AssertionError(f"{error}: expected and shown: {different}") from None

    def quiet_console(self, *allowed):
        lines = [entry["message"] for entry in self.browser.log() if entry["level"] in ("SEVERE", "WARNING")]
        lines = [line for line in lines if not any(part in line for part in allowed)]
        assert not lines, f"console messages: {lines}"

    def command(self, button):
        """Presses a button and returns the reply that the page shows."""
        self.browser.click(button)
        reply = lambda: [part for part in [self.text("#reply")] if part and not part.endswith("…")]
        return wait("a reply to the command", reply)[0]

    # --- the checks ---

    def test_values_on_the_page_are_those_of_the_status(self):
        wait("the first steps", lambda: self.run.status()["progress"]["step"] >= 5)
        self.shows_the_status()
        self.quiet_console()

    def test_the_pipeline_is_drawn_in_order_with_waits(self):
        names = self.browser.script("return [...document.querySelectorAll('.pipeline h3')].map((h) => h.textContent)")
        assert names == ["Planner", "Dispatcher", "Targets", "Pool", "Drafters", "Trainer"], names
        text = "return [...document.querySelectorAll('.flow .waits')].map((w) => w.textContent).join('|')"
        wait("a wait is shown", lambda: re.search(r"s wait \d+\u202f%", self.browser.script(text)))

    def test_history_is_drawn(self):
        path = "return document.querySelector('[data-series=\"training.loss\"] path')?.getAttribute('d') || ''"
        wait("a sparkline of losses", lambda: self.browser.script(path).count("L") >= 3)

    def test_every_screen_fits_and_can_be_read_in_light_and_dark(self):
        with open(os.path.join(HERE, "checks.js"), encoding="utf-8") as file:
            checks = file.read()
        problems = []
        for width, height in SCREENS:
            for dark in (False, True):
                self.browser.emulate(width, height, dark)
                found = self.browser.script(checks)
                problems += [f"{width} px, {'dark' if dark else 'light'}: {problem}" for problem in found]
        grounds = []
        for dark in (False, True):
            self.browser.emulate(1600, 1000, dark)
            grounds.append(self.browser.script("return getComputedStyle(document.body).backgroundColor"))
        assert grounds[0] != grounds[1], "light and dark are the same"
        assert not problems, "\n  ".join(["the page has problems:"] + problems)

    def test_the_tree_of_a_screen_reader_names_everything(self):
        nodes = self.browser.devtools("Accessibility.getFullAXTree", {})["nodes"]
        value = lambda node, key: node.get(key, {}).get("value", "")
        roles = [(value(node, "role"), value(node, "name")) for node in nodes if not node.get("ignored")]
        for role in ("button", "table", "progressbar", "group", "region", "link"):
            names = [name for found, name in roles if found == role]
            assert names and all(names), f"{role}: {names}"
        live = self.browser.script("return [...document.querySelectorAll('[aria-live], [role=status]')].map((e) => e.id)")
        assert sorted(live) == ["announced", "lost", "reply"], f"screen readers must not read values that change each second: {live}"

    def test_every_button_is_reached_by_keyboard_and_shows_it(self):
        self.browser.script("document.activeElement.blur(); window.scrollTo(0, 0)")
        reached = []
        for _ in range(3):
            self.browser.press(TAB)
            reached.append(
                self.browser.script(
                    "const e = document.activeElement, s = getComputedStyle(e);"
                    "return [e.dataset.command || e.textContent, s.outlineStyle !== 'none' && parseFloat(s.outlineWidth) >= 2]"
                )
            )
        assert reached == [["pause", True], ["checkpoint", True], ["reload", True]], reached

    def test_a_checkpoint_by_keyboard(self):
        self.browser.script("document.querySelector('[data-command=checkpoint]').focus()")
        self.browser.press(ENTER)
        wait("a reply", lambda: self.text("#reply") and not self.text("#reply").endswith("…"))
        assert "fine" in self.browser.script("return document.querySelector('#reply').className"), self.text("#reply")

    def test_pause_and_resume(self):
        self.command("[data-command=pause]")
        wait("the run is paused", lambda: self.run.status()["run"]["paused"])
        wait("the button offers to resume", lambda: self.text("#pause") == "Resume")
        wait("the page shows it", lambda: "Paused" in self.text("#state"))
        wait("no actor is busy", lambda: self._still())
        self.shows_the_status()
        step = self.run.status()["progress"]["step"]
        self.command("[data-command=resume]")
        wait("the button offers to pause", lambda: self.text("#pause") == "Pause")
        wait("steps continue", lambda: self.run.status()["progress"]["step"] > step)

    def _still(self):
        actors = self.run.status()["actors"]
        return all(actor["state"] != "busy" and actor["busy"] == 0 for actor in actors)

    def test_an_edited_file_is_confirmed_and_a_broken_one_refused_with_the_reason(self):
        self.run.edit("min_ready = 4", "min_ready = 5")
        try:
            self._edited()
        finally:
            shutil.copy(os.path.join(HERE, "run.toml"), self.run.config)
        wait("the old minimum is back", lambda: self.text("#draws").startswith("A draw needs 4"))

    def _edited(self):
        wait("the page shows the new minimum", lambda: self.text("#draws").startswith("A draw needs 5"))
        wait("the reload is in the list", lambda: self.browser.script("return document.querySelectorAll('#reloads .fine').length"))
        self.shows_the_status()
        self.run.edit("min_ready = 5", "min_ready = 500")
        reply = self.command("[data-command=reload]")
        assert reply.startswith("Refused: ") and "pool.min_ready" in reply, reply
        wait("it is in the list", lambda: "pool.min_ready" in self.text("#reloads .error .text"))
        step = self.run.status()["progress"]["step"]
        wait("steps continue", lambda: self.run.status()["progress"]["step"] > step)
        self.shows_the_status()

    def test_a_lost_connection_is_reported_and_restored(self):
        self.quiet_console("409")
        self.run.kill()
        wait("the page shows it", lambda: self.text("#lost").startswith("Connection lost. Data as of "))
        assert self.browser.script("return !document.querySelector('#lost').hidden && document.body.className === 'stale'")
        self.run.start()
        wait("the page is connected again", lambda: self.browser.script("return document.querySelector('#lost').hidden"))
        wait("it is the new start", lambda: self.text("#start").startswith("start 2 "))
        wait("steps", lambda: self.run.status()["progress"]["step"] >= 1)
        self.shows_the_status()
        gap = "return document.querySelector('[data-series=\"pool.batches\"], [data-series] path').getAttribute('d')"
        wait("the line has a gap", lambda: self.browser.script(gap).count("M") >= 2)
        self.quiet_console("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")

    def test_commands_ask_for_a_configured_token(self):
        secret = secrets.token_hex(16)
        path = os.path.join(self.run.folder, "token")
        with open(path, "w", encoding="utf-8") as file:
            file.write(secret + "\n")
        guarded = Run(f"admin.token_file={path}")
        first, self.run = self.run, guarded
        try:
            guarded.start()
            self.browser.open(f"http://{guarded.address}/")
            wait("the page is drawn", self.drawn)
            self.browser.click("[data-command=checkpoint]")
            opened = lambda: self.browser.script("return document.querySelector('#ask').open")
            wait("the page asks", opened)
            assert self.browser.script("return document.activeElement.id") == "token", "the field has the focus"
            self.browser.type("#token", "wrong-" + secret + ENTER)
            wait("the page rejects it", lambda: opened() and "differs from" in self.text("#ask-why"))
            self.browser.type("#token", secret + ENTER)
            wait("a reply", lambda: not opened() and self.text("#reply") and not self.text("#reply").endswith("…"))
            stored = self.browser.script("return sessionStorage.getItem('token') === arguments[0]", secret)
            assert stored, "the token is asked for once"
            self.shows_the_status()
        finally:
            self.run = first
            guarded.close()


def main():
    need_browser()

    def late(*_):
        raise TimeoutError(f"the tests took longer than {LONGEST} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST)
    only = sys.argv[1:]
    run = Run()
    failed = []
    browser = None
    try:
        run.start()
        browser = Browser()
        browser.open(f"http://{run.address}/")
        browser.emulate(1600, 1000, False)
        tests = Tests(browser, run)
        wait("the page is drawn", tests.drawn)
        names = [name for name in vars(Tests) if name.startswith("test_") and (not only or any(part in name for part in only))]
        for name in names:
            try:
                getattr(tests, name)()
                print(f"{name} ... ok", flush=True)
            except (AssertionError, OSError) as error:
                print(f"{name} ... FAILED\n  {error}", flush=True)
                failed.append(name)
            except TimeoutError:
                raise
            except Exception:
                traceback.print_exc()
                failed.append(name)
        print(f"test result: {'FAILED' if failed else 'ok'}. {len(names) - len(failed)} passed; {len(failed)} failed")
    finally:
        signal.alarm(0)
        if browser:
            browser.close()
        run.close()
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
