//! State of a rendering, and its limits.

use super::{Error, types::Scope};

/// Limit of nested statements, expressions and calls, as Python limits recursion.
const MAX_DEPTH: usize = 250;
/// Limit of the rendered text in bytes.
pub const MAX_TEXT: usize = 1 << 28;

/// End of a list of statements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    Next,
    Break,
    Continue,
}

/// State of a rendering.
pub struct Interpreter<'a> {
    pub context: &'a Scope,
    pub out: String,
    depth: usize,
}

impl<'a> Interpreter<'a> {
    pub fn new(context: &'a Scope) -> Interpreter<'a> {
        Interpreter { context, out: String::new(), depth: 0 }
    }

    /// Runs `inner` one level deeper.
    pub fn deeper<T>(&mut self, inner: impl FnOnce(&mut Self) -> Result<T, Error>) -> Result<T, Error> {
        if self.depth >= MAX_DEPTH {
            return Err(Error::new("the template calls itself too deeply"));
        }
        self.depth += 1;
        let done = inner(self);
        self.depth -= 1;
        done
    }

    /// Text that `inner` writes.
    pub fn captured(&mut self, inner: impl FnOnce(&mut Self) -> Result<Flow, Error>) -> Result<(String, Flow), Error> {
        let outer = std::mem::take(&mut self.out);
        let done = self.deeper(inner);
        let text = std::mem::replace(&mut self.out, outer);
        done.map(|flow| (text, flow))
    }

    pub fn write(&mut self, text: &str) -> Result<(), Error> {
        if self.out.len() + text.len() > MAX_TEXT {
            return Err(Error::new("the rendered text is too long"));
        }
        self.out.push_str(text);
        Ok(())
    }
}
