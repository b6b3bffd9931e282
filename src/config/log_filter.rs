//! Filter of log lines: levels, also by module.

/// Words that a directive may use as its level.
const LEVELS: [&str; 6] = ["error", "warn", "info", "debug", "trace", "off"];

/// Returns what is wrong with a filter such as `info,draftmill::data=debug`.
///
/// `tracing_subscriber` takes a single unknown word for the name of a module, which disables every other line.
pub fn problem(filter: &str) -> Option<String> {
    if filter.trim().is_empty() {
        return Some("the filter is empty".into());
    }
    for directive in filter.split(',').map(str::trim) {
        let (module, level) = directive.split_once('=').unwrap_or(("all", directive));
        if module.trim().is_empty() {
            return Some(format!("`{directive}` names no module"));
        }
        if !LEVELS.contains(&level.trim().to_lowercase().as_str()) {
            return Some(format!("`{}` is no level", level.trim()));
        }
    }
    tracing_subscriber::EnvFilter::try_new(filter).err().map(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A word that is no level used to disable all lines (found by attack, issue 17 E7).
    #[test]
    fn a_directive_without_a_module_is_a_level() {
        for filter in ["info", "WARN", "off", "info,draftmill::data=debug", "draftmill::data=trace, warn"] {
            assert_eq!(problem(filter), None, "{filter}");
        }
        for filter in
            ["", "verbose", "infos", "info,loud", "draftmill", "draftmill::data", "=info", "a=", "a=loud", "info,", "3"]
        {
            assert!(problem(filter).is_some(), "{filter}");
        }
    }
}
