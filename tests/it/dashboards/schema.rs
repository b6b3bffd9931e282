//! The part of JSON Schema that Grafana's dashboard schema uses. An unknown keyword fails the test.

use serde_json::Value;

/// Returns every violation of the schema as a sentence with its path.
pub fn problems(schema: &Value, value: &Value) -> Vec<String> {
    check(schema, schema, value, "dashboard")
}

fn check(root: &Value, schema: &Value, value: &Value, at: &str) -> Vec<String> {
    let Some(keywords) = schema.as_object() else { return Vec::new() };
    let properties = &schema["properties"];
    let inner = |schema: &Value, name: &str, value: &Value| check(root, schema, value, &format!("{at}.{name}"));
    let mut found = Vec::new();
    for (keyword, wanted) in keywords {
        let list = || wanted.as_array().into_iter().flatten();
        match keyword.as_str() {
            "$schema" | "$comment" | "definitions" => {}
            "$ref" => {
                let name = wanted.as_str().unwrap().strip_prefix("#/definitions/").unwrap();
                found.extend(check(root, &root["definitions"][name], value, at));
            }
            "type" => {
                let fits = |name: &Value| is(name.as_str().unwrap(), value);
                if !(if wanted.is_array() { list().any(fits) } else { fits(wanted) }) {
                    found.push(format!("{at}: {value} is no {wanted}"));
                }
            }
            "const" | "enum" => {
                if wanted != value && !list().any(|one| one == value) {
                    found.push(format!("{at}: {value} is not {wanted}"));
                }
            }
            "required" => {
                let missing = list().filter_map(Value::as_str).filter(|name| value.get(name).is_none());
                found.extend(missing.map(|name| format!("{at}: {name} is missing")));
            }
            "properties" => {
                let given = wanted
                    .as_object()
                    .unwrap()
                    .iter()
                    .filter_map(|(name, schema)| Some((name, schema, value.get(name)?)));
                found.extend(given.flat_map(|(name, schema, value)| inner(schema, name, value)));
            }
            "additionalProperties" => {
                let more = value.as_object().into_iter().flatten().filter(|(name, _)| properties.get(name).is_none());
                found.extend(more.flat_map(|(name, value)| match wanted {
                    Value::Bool(false) => vec![format!("{at}: {name} is not known")],
                    schema => inner(schema, name, value),
                }));
            }
            "items" => {
                let items = value.as_array().into_iter().flatten().enumerate();
                found.extend(items.flat_map(|(i, item)| check(root, wanted, item, &format!("{at}[{i}]"))));
            }
            "anyOf" => {
                let all: Vec<_> = list().map(|one| check(root, one, value, at)).collect();
                if all.iter().all(|problems| !problems.is_empty()) {
                    found.push(format!("{at}: fits none of {} shapes: {all:?}", all.len()));
                }
            }
            other => panic!("the schema uses {other}, which this test does not understand"),
        }
    }
    found
}

fn is(name: &str, value: &Value) -> bool {
    match name {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("the schema has the type {other}, which this test does not understand"),
    }
}
