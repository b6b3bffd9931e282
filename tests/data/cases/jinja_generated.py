"""Writes jinja_generated.json: template fragments drawn at random, with what transformers' Jinja2 makes of them.

    VENV/bin/python tests/data/cases/jinja_generated.py [SEED COUNT FILE]

VENV is the virtual environment of tests/data/templates/public.py. Development only: no build and no test runs it. With a
seed, a count and a file it writes another table, for a search by hand.

Format: one fragment a line, [TEMPLATE, TEXT], or [TEMPLATE, null] if Jinja2 refuses. Fragments whose text holds an address
in memory are left out.
"""

import copy
import json
import pathlib
import random
import re
import signal
import sys
import warnings

from transformers.utils import chat_template_utils

SEED, COUNT = 17, 2500
CONTEXT = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "the answer"}],
    "tools": None,
    "documents": None,
    "bos_token": "<s>",
    "eos_token": "</s>",
    "add_generation_prompt": True,
}
VALUES = """none|nope|'abc'|''|'a b c'|' x\\n'|'Ab-cD (ef'|'3'|'3.7'|'1e3'|'-5'|'é ß'|'a,b,,c'|[1,2]|[]|['b','A','c']|[3,1,2]
|[[1,2],[3]]|[none,1]|['a',1]|[true,1.0]|{'a':1}|{}|{'b':2,'a':1}|3|0|-7|1.5|-0.0|2.5|1e20|0.1|true|false|messages
|messages[0]|(1,2)|('a',)|()|range(3)|range(5,1,-2)|{'a':1}.items()|{'a':1}.keys()|{'x':1}.values()|namespace(a=1)
|cycler('a','b')|joiner()|'x'.upper|1 if false|12345678901234567890|tools|add_generation_prompt""".replace("\n", "").split("|")
FILTERS = """abs;attr('a');batch(2)|list;batch(2,'z')|list;capitalize;center(7);count;default('D');default('D',true);d;
dictsort;dictsort(reverse=true);dictsort(false,'value');e;filesizeformat;first;float;float(2.0);forceescape;groupby(0);
groupby('role');indent;indent(2,true);indent('> ');indent(2,blank=true);int;int(7);int(0,16);items|list;join;join('-');
join(', ',attribute='role');last;length;list;lower;map('upper')|list;map('length')|list;map(attribute='a')|list;
map(attribute='a',default=0)|list;map(attribute=0)|list;max;min;pprint;reject('none')|list;reject|list;rejectattr('a')|list;
replace('a','b');replace('','-');replace('b','',1);reverse;reverse|list;round;round(1);round(0,'ceil');round(1,'floor');
round(-1);safe;select|list;select('odd')|list;select('gt',1)|list;selectattr('a')|list;selectattr('role','eq','user')|list;
slice(2)|list;slice(3,'f')|list;sort;sort(reverse=true);sort(true,true);sort(attribute='role');string;sum;sum(attribute='a');
sum(start=5);title;tojson;tojson(indent=2);tojson(sort_keys=true);tojson(ensure_ascii=true);trim;trim('a');truncate(5);
truncate(5,true);truncate(4,false,'..',0);unique|list;unique(true)|list;upper;urlencode;wordcount;xmlattr;nofilter;
length > 1;first|upper;join|length;tojson|length;items|first;dictsort|first""".replace("\n", "").split(";")
TESTS = """boolean;callable;defined;divisibleby 2;divisibleby(3);eq 1;equalto 'abc';escaped;even;false;filter;float;ge 2;gt 2;
in [1,2];in 'abc';integer;iterable;le 2;lower;lt 2;mapping;ne 1;none;number;odd;sameas none;sequence;string;test;true;
undefined;upper;nosuch;not none;not defined;lessthan 3""".replace("\n", "").split(";")
METHODS = """split();split(',');split('b',1);split(maxsplit=1);split(sep=' ');rsplit();rsplit(' ',1);rsplit(None,1);splitlines();
splitlines(true);strip();strip('a');lstrip();rstrip('c');startswith('a');startswith(('x','a'));startswith('b',1);
endswith('c');endswith(('c','d'));find('b');find('z');rfind('a');index('b');rindex('c');count('a');count('');count(1);
replace('a','X');replace('a','X',1);upper();lower();title();capitalize();swapcase();casefold();center(9);center(8,'*');
ljust(6);ljust(6,'.');rjust(6);zfill(6);join(['x','y']);join('xyz');join([1]);partition('b');rpartition('b');
removeprefix('a');removesuffix('c');expandtabs();isalnum();isalpha();isascii();isdecimal();isdigit();isidentifier();
islower();isnumeric();isprintable();isspace();istitle();isupper();format(1);keys();keys()|list;values()|list;items()|list;
get('a');get('z');get('z',0);get('a',1,2);copy();append(1);pop();update({});extend([1]);items;keys;real;x;__class__;
index(1);index;bit_length();is_integer();next();current;fromkeys([1]);translate({97:'x'});maketrans('a','b');
format_map({});role;content;a;setdefault('a');a();role.upper();start;step""".replace("\n", "").split(";")
ITEMS = "[0];[-1];[5];['a'];['x'];[1:];[:1];[::-1];[-2:];[:-1];[1:3];[::2];[none];[1.0];[true];['upper'];[0:5:2];[5:1:-1]".split(";")
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "!=", "<", ">", "<=", ">=", "in", "not in", "and", "or"]
FORMS = """{% for i in W %}[{{ i }}{{ loop.index }}]{% else %}E{% endfor %}
{% for a, b in W %}[{{ a }}{{ b }}]{% else %}E{% endfor %}
{% set a, b = W %}{{ a }}{{ b }}
{% if W %}T{% else %}F{% endif %}
{{ '%s|%r' % (W, 1) }}
{{ '%s' % W }}
{{ '%d' % W }}
{{ 'q' % W }}
{{ '%(a)s' % W }}
{{ '%5s|%-5s|%05d' % (W, W, W) }}
{{ '%x|%g|%e' % (W, W, W) }}
{{ '{}|{!r}'.format(W, W) }}
{{ '{:>8}'.format(W) }}
{{ '{:05}'.format(W) }}
{{ '{:.2}'.format(W) }}
{{ '{:,}'.format(W) }}
{{ '{0.a}{0[0]}'.format(W) }}
{{ '{:g}{:e}{:%}'.format(W, W, W) }}
{{ '{:+d}{:#x}{:b}'.format(W, W, W) }}
{{ dict(W) }}
{{ namespace(W).a }}
{{ range(W)|list }}
{{ {W: 1} }}
{{ dict(**W) }}
{{ range(*W) }}
{{ -W }}
{{ not W }}
{{ [W, W]|join }}
{{ {'k': W}|tojson }}
{{ W if W else 0 }}
{{ 'x' in W }}
{% macro m(x=W, y=2) %}<{{ x }}{{ y }}{{ varargs }}{{ kwargs }}>{% endmacro %}{{ m() }}{{ m(1,2,3,z=4) }}{{ m(y=W) }}""".split("\n")
DATA = ["a", "\n", "  ", "\n  b\n", "{#- c -#}", "{# c #}\n", " x ", "\t\n", "{% raw %}{{ r }}\n{% endraw %}"]
DATA += ["\n{%- raw -%} {% if %} {%- endraw -%} z"]


class Slow(Exception):
    """A fragment took too long, such as a large power."""


class Maker:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.pick = self.random.choice

    def expression(self, depth):
        if depth == 0:
            return self.pick([*VALUES, "x", "y", "ns.a", "loop.index"])
        inner = lambda: self.expression(depth - 1)
        kinds = [
            lambda: f"({inner()})|{self.pick(FILTERS)}",
            lambda: f"({inner()}) is {self.pick(TESTS)}",
            lambda: f"({inner()}).{self.pick(METHODS)}",
            lambda: f"({inner()}){self.pick(ITEMS)}",
            lambda: f"({inner()}) {self.pick(OPERATORS)} ({inner()})",
            lambda: f"{inner()} if {inner()} else {inner()}",
            lambda: f"[{inner()}, {inner()}]",
            lambda: f"{{'a': {inner()}, 'b': {inner()}}}",
        ]
        return self.pick(kinds)()

    def tag(self, text):
        return f"{{%{self.pick(['', '-', '+'])} {text} {self.pick(['', '-', '+'])}%}}"

    def body(self, depth, loop=False):
        return "".join(self.part(depth, loop) for _ in range(self.random.randrange(1, 4)))

    def part(self, depth, loop):
        kind = self.random.randrange(13)
        tag, body, value = self.tag, lambda: self.body(depth - 1, loop), lambda: self.expression(0)
        if depth == 0 or kind < 3:
            return self.pick(DATA)
        if kind < 5:
            return f"{{{{{self.pick(['', '-'])} {self.expression(self.random.randrange(2))} {self.pick(['', '-'])}}}}}"
        if kind == 5:
            more = self.pick(["", tag("else") + body(), tag(f"elif {value()}") + body()])
            return tag(f"if {self.expression(1)}") + body() + more + tag("endif")
        if kind == 6:
            items = self.pick(["[1,2,3]", "range(3)", "'abc'", "messages", "{'a':1,'b':2}", value()])
            test = self.pick(["", "", " if x", " if loop", " if x != 2", " if ns.a"]) + self.pick(["", "", "", " recursive"])
            uses = ["", "{{ loop.last }}{{ loop.index }}", "{{ loop.revindex }}{{ loop.previtem }}{{ loop.nextitem is defined }}"]
            uses += ["{{ loop.changed(x) }}{{ loop.cycle('p','q') }}{{ loop.length }}"]
            more = self.pick(["", "", tag("else") + body()])
            return tag(f"for x in {items}{test}") + self.body(depth - 1, True) + self.pick(uses) + more + tag("endfor")
        if kind == 7:
            return tag(f"set {self.pick(['x', 'y', 'ns.a', 'x, y'])} = {self.expression(1)}")
        if kind == 8:
            return tag("set y") + body() + tag("endset") + "{{ y }}"
        if kind == 9:
            reads = self.pick(["", "{{ p }}{{ q }}", "{{ caller() }}", "{{ varargs }}"])
            calls = ["{{ m() }}", "{{ m(1) }}", "{{ m(1, q=2) }}", "{{ m(1,2,3) }}", "{% call m(3) %}C{{ y }}{% endcall %}"]
            return tag(f"macro m(p, q={value()})") + self.body(depth - 1) + reads + tag("endmacro") + self.pick(calls)
        if kind == 10:
            return tag(f"with x = {value()}, y = {value()}") + body() + "{{ x }}{{ y }}" + tag("endwith")
        if kind == 11:
            return tag("filter " + self.pick(["upper", "trim", "length", "replace('a','b')|title"])) + body() + tag("endfilter")
        if loop and self.random.random() < 0.5:
            return tag(self.pick(["break", "continue"]))
        return tag("generation") + self.body(depth - 1) + tag("endgeneration")

    def fragment(self):
        kind = self.random.randrange(10)
        if kind < 2:
            return self.pick(FORMS).replace("W", f"({self.pick(VALUES)})")
        if kind < 6:
            return f"{{{{ {self.expression(1)} }}}}"
        if kind < 8:
            return f"{{{{ {self.expression(2)} }}}}"
        return "{% set ns = namespace(a=1) %}" + self.body(3) + "{{ x }}|{{ y }}|{{ ns.a }}"


def rendered(environment, template):
    """Text of a fragment, or null."""
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        return environment.from_string(template).render(**copy.deepcopy(CONTEXT))
    except Slow:
        raise
    except Exception:
        return None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def slow(*_):
    raise Slow


def main():
    seed, count, file = SEED, COUNT, pathlib.Path(__file__).with_suffix(".json")
    if len(sys.argv) > 1:
        seed, count, file = int(sys.argv[1]), int(sys.argv[2]), pathlib.Path(sys.argv[3])
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, slow)
    maker, environment = Maker(seed), chat_template_utils._compile_jinja_template("").environment
    rows = {}
    while len(rows) < count:
        template = maker.fragment()
        # A power or a product of large numbers does not end.
        if template in rows or "1234567890" in template and ("*" in template or "pow" in template):
            continue
        try:
            text = rendered(environment, template)
            json.dumps([template, text], ensure_ascii=False).encode()
        except (Slow, UnicodeEncodeError):
            continue
        if not (text and re.search(r"(?i) at 0x[0-9a-f]|object at|<function|<built-in|<bound method|<generator|of type", text)):
            rows[template] = text
    lines = [json.dumps(row, ensure_ascii=False, separators=(",", ":")) for row in rows.items()]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
