//! The template engine against tables of what Jinja2 renders and refuses, as transformers sets it up.

use draftmill::data::chat::{ChatError, ChatTemplate, Conversation, Role, Turn};
use serde_json::{Map, Value};
use std::{fmt::Write, fs, path::Path};

fn table(name: &str) -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/cases").join(name);
    let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// Text of a fragment with the context of the tables, or the refusal.
fn rendered(fragment: &str) -> Result<String, ChatError> {
    let turn = |role, content: &str| Turn { role, content: content.into(), extra: Map::new() };
    let turns = vec![turn(Role::User, "hi"), turn(Role::Assistant, "the answer")];
    ChatTemplate::from_text(fragment, "<s>", "</s>", Vec::new())?.prompt(&Conversation { turns, tools: None })
}

/// Differences of the fragments, and the number of those that only this engine refuses.
fn differences<'a>(rows: impl Iterator<Item = (&'a str, Option<&'a str>)>) -> (String, usize) {
    let mut different = String::new();
    let mut refused = 0;
    for (fragment, expected) in rows {
        match (rendered(fragment), expected) {
            (Ok(text), Some(expected)) if text == expected => {}
            (Err(_), None) => {}
            (Err(_), Some(_)) => refused += 1,
            (Ok(text), expected) => writeln!(different, "{fragment}: {text:?} instead of {expected:?}").unwrap(),
        }
    }
    (different, refused)
}

/// minijinja#951 and its neighbours: of these fragments minijinja 3.1 with `pycompat` renders 48 otherwise.
#[test]
fn minijinja_951_fragments_render_as_in_jinja2() {
    let table = table("jinja_expressions.json");
    let rows = table["expressions"].as_array().unwrap();
    assert_eq!(rows.len(), 585);
    let (address, rows): (Vec<_>, Vec<_>) =
        rows.iter().partition(|row| row["renders"].as_str().is_some_and(|text| text.contains(" at 0x")));
    let rows = rows.iter().map(|row| (row["template"].as_str().unwrap(), row["renders"].as_str()));
    assert_eq!(differences(rows), (String::new(), 0));
    // The text of a method holds its address in memory: no engine can write it, and silence would be worse.
    let [address] = address[..] else { panic!("{address:?}") };
    let error = rendered(address["template"].as_str().unwrap()).unwrap_err();
    assert!(error.to_string().contains("has no text"), "{error}");
}

#[test]
fn generated_fragments_render_as_in_jinja2_or_are_refused() {
    let table = table("jinja_generated.json");
    let rows = table.as_array().unwrap();
    assert_eq!(rows.len(), 2500);
    let rows = rows.iter().map(|row| (row[0].as_str().unwrap(), row[1].as_str()));
    // Slices of values without items, which Jinja2 computes before it renders, sets, and texts that hold an address.
    assert_eq!(differences(rows), (String::new(), 18));
}

#[test]
fn hostile_templates_are_refused_and_end() {
    let deep = |begin: &str, inner: &str, end: &str, count| begin.repeat(count) + inner + &end.repeat(count);
    let grows = |by: &str| {
        format!("{{% set ns = namespace(l=['a']) %}}{{% for x in range(99999) %}}{{% set ns.l = {by} %}}{{% endfor %}}")
    };
    let refused = [
        "{% macro m(n) %}{{ n }}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}".into(),
        "{% macro m(n) %}{% if 1 %}{% for x in [1] %}{{ (m(n) | trim) ~ 'a' }}{% endfor %}{% endif %}{% endmacro %}{{ m(0) }}".into(),
        "{% macro m(n) %}{% call m(n) %}{{ caller() }}{% endcall %}{% endmacro %}{{ m(1) }}".into(),
        "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}".into(),
        format!("{{{{ {} }}}}", deep("(", "1", ")", 5000)),
        format!("{{{{ {} }}}}", deep("-", "1", "", 5000)),
        format!("{{{{ {} }}}}", deep("not ", "1", "", 5000)),
        format!("{{{{ {} }}}}", deep("[", "", "]", 5000)),
        format!("{{{{ {} }}}}", deep("1 if 1 else ", "1", "", 5000)),
        format!("{{{{ 1{} }}}}", " + 1".repeat(5000)),
        format!("{{{{ x{} }}}}", ".y".repeat(5000)),
        format!("{{{{ 1{} }}}}", " | abs".repeat(5000)),
        deep("{% if 1 %}", "", "{% endif %}", 5000),
        "{{ 'a' * 999999999999 }}".into(),
        "{{ [1] * 999999999999 }}".into(),
        "{{ '%999999999d' % 1 }}{{ 1 }}".into(),
        "{{ 'a'.center(999999999) }}".into(),
        "{{ range(999999) }}".into(),
        "{{ 10 ** 99 }}".into(),
        grows("[ns.l]"),
        grows("[ns.l, ns.l]"),
        grows("ns.l | batch(1) | list"),
        grows("namespace(l=ns.l)"),
        grows("ns"),
        grows("ns.l ~ ns.l"),
    ];
    for fragment in refused {
        let shown: String = fragment.chars().take(80).collect();
        let error = rendered(&fragment).expect_err(&shown).to_string();
        assert!(error.contains("too") || error.contains("long") || error.contains("range"), "{shown}: {error}");
    }
    assert_eq!(rendered(&format!("{{{{ {} }}}}", deep("(", "1", ")", 50))).unwrap(), "1");
    assert_eq!(
        rendered("{% macro m(n) %}{{ n }}{% if n %}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(9) }}").unwrap(),
        "9876543210"
    );
}

#[test]
fn an_error_names_its_line_or_its_value() {
    for (fragment, part) in [
        ("a\n{% if 1 %}", "line 2: expected the tag `elif` or `else` or `endif`, found the end of the template"),
        ("{{ 1 | nofilter }}", "line 1: the filter `nofilter` is unknown"),
        ("{% for i in none %}{% endfor %}", "a value of type NoneType has no items"),
        ("{{ messages[0].nope.deeper }}", "a value of type dict has no attribute `nope`"),
        ("{{ nope.x }}", "`nope` is undefined"),
        ("{{ 'a' + 1 }}", "`+` does not take values of type str and int"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% include 'other' %}", "`include` needs another template"),
    ] {
        let error = rendered(fragment).unwrap_err().to_string();
        assert!(error.contains(part), "{fragment}: {error}");
    }
}
