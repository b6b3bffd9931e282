//! Names of filters, tests and methods.

use super::types::{Object, Value, View};

const FILTERS: [&str; 54] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "random",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "urlize",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

/// True if there is a filter of this name.
pub fn is_filter(name: &str) -> bool {
    FILTERS.contains(&name)
}

const TESTS: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

/// True if there is a test of this name.
pub fn is_test(name: &str) -> bool {
    TESTS.contains(&name)
}

const TEXT: [&str; 47] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "encode",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "maketrans",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "translate",
    "upper",
    "zfill",
];

const LIST: [&str; 3] = ["copy", "count", "index"];
const SEQUENCE: [&str; 2] = ["count", "index"];
const DICT: [&str; 6] = ["copy", "fromkeys", "get", "items", "keys", "values"];
const INT: [&str; 5] = ["as_integer_ratio", "bit_count", "bit_length", "conjugate", "to_bytes"];
const FLOAT: [&str; 5] = ["as_integer_ratio", "conjugate", "fromhex", "hex", "is_integer"];
const LIST_CHANGES: [&str; 8] = ["append", "clear", "extend", "insert", "pop", "remove", "reverse", "sort"];
const DICT_CHANGES: [&str; 5] = ["clear", "pop", "popitem", "setdefault", "update"];

/// True if the value has this method.
pub fn has_method(value: &Value, name: &str) -> bool {
    let names: &[&str] = match value {
        Value::Str(_) | Value::Markup(_) => &TEXT,
        Value::List(_) => &LIST,
        Value::Tuple(_) | Value::Range(_) => &SEQUENCE,
        Value::Dict(_) => &DICT,
        Value::Int(_) | Value::Bool(_) => &INT,
        Value::Float(_) => &FLOAT,
        Value::Object(object) => match &**object {
            Object::Group(_) => &SEQUENCE,
            Object::Loop(_) => &["changed", "cycle"],
            Object::Cycler { .. } => &["next", "reset"],
            Object::View(View::Keys | View::Items, _) => &["isdisjoint", "mapping"],
            Object::View(..) => &["mapping"],
            Object::Generator(_) => &["close", "send", "throw"],
            Object::Function("dict") => &["fromkeys"],
            _ => &[],
        },
        Value::Undefined(_) | Value::None => &[],
    };
    names.contains(&name)
}

/// True if the method changes its value, which the sandbox refuses.
pub fn has_changing_method(value: &Value, name: &str) -> bool {
    match value {
        Value::List(_) => LIST_CHANGES.contains(&name),
        Value::Dict(_) => DICT_CHANGES.contains(&name),
        _ => false,
    }
}
