//! Template engine that renders the chat templates of Hugging Face as transformers does with Jinja2.
//!
//! The values are Python's, the rules those of Jinja2's immutable sandbox with `trim_blocks` and `lstrip_blocks`. What the
//! engine does not know is an error, never another text. General engines differ in loops, comparisons, attributes and
//! operators, which no hook of theirs replaces (minijinja#951), and a wrong text is trained on without a word.
//!
//! ```text
//! text ──lexer──▶ tokens ──parser, expression──▶ ast ──interpreter, eval──▶ text
//!                                    values: types, value, object, loops
//!                                    rules: operators, attribute, call, methods, filters, checks
//! ```

mod args;
mod ast;
mod attribute;
mod call;
mod checks;
mod date;
mod eval;
mod expression;
mod filters;
mod format;
mod interpreter;
mod json;
mod letters;
mod lexer;
mod loops;
mod methods;
mod names;
mod object;
mod operators;
mod parser;
mod percent;
mod state;
mod strings;
mod text;
mod text_filters;
mod types;
mod value;

pub use text::{is_space, string};
pub use types::Value;

use std::{fmt, rc::Rc, sync::Arc};

/// Refusal of a template, as a sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(Arc<str>);

impl Error {
    fn new(text: impl Into<Arc<str>>) -> Error {
        Error(text.into())
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

/// JSON of a value, as the filter `tojson` writes it.
///
/// # Errors
/// A value that JSON does not have.
pub fn json(value: &Value) -> Result<String, Error> {
    text::string(&json::dumps(value, args::Args::default())?)
}

/// Compiled template.
#[derive(Debug)]
pub struct Template(ast::Body);

impl Template {
    /// Parses a template.
    ///
    /// # Errors
    /// The line that is no template, or an unknown filter or test.
    pub fn new(text: &str) -> Result<Template, Error> {
        parser::parse(text).map(Template)
    }

    /// Text of the template with these variables.
    ///
    /// # Errors
    /// Whatever Jinja2 refuses, or this engine does not support.
    pub fn render(&self, variables: &[(&str, Value)]) -> Result<String, Error> {
        let context = types::Scope::default();
        for (name, value) in variables {
            context.set(&Arc::from(*name), value.clone());
        }
        let mut interpreter = state::Interpreter::new(&context);
        interpreter.body(&self.0, &Rc::new(types::Scope::default()))?;
        Ok(interpreter.out)
    }
}
