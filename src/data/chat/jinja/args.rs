//! Arguments of calls, filters and tests.

use super::{Error, types::Value};
use std::sync::Arc;

/// Arguments of a call.
#[derive(Clone, Debug, Default)]
pub struct Args {
    pub positional: Vec<Value>,
    pub named: Vec<(Arc<str>, Value)>,
}

impl Args {
    /// Removes an argument by name.
    pub fn take(&mut self, name: &str) -> Option<Value> {
        let at = self.named.iter().position(|(known, _)| **known == *name)?;
        Some(self.named.remove(at).1)
    }

    /// Arguments in the order of `names`; the first `required` must be given. An empty name takes no argument by name.
    ///
    /// # Errors
    /// Too many, too few or unknown arguments of `function`.
    pub fn bind<const N: usize>(
        mut self,
        function: &str,
        names: [&str; N],
        required: usize,
    ) -> Result<[Option<Value>; N], Error> {
        let count = self.positional.len();
        if count > N {
            return Err(Error::new(format!("`{function}` takes at most {N} arguments, found {count}")));
        }
        let mut found = [const { None }; N];
        for (slot, value) in found.iter_mut().zip(self.positional.drain(..)) {
            *slot = Some(value);
        }
        for (index, name) in names.iter().enumerate() {
            if found[index].is_none() && !name.is_empty() {
                found[index] = self.take(name);
            }
        }
        if let Some((name, _)) = self.named.first() {
            return Err(Error::new(format!("`{function}` takes no argument `{name}`")));
        }
        if found[..required].iter().any(Option::is_none) {
            return Err(Error::new(format!("`{function}` lacks an argument")));
        }
        Ok(found)
    }

    /// No arguments.
    pub fn none(self, function: &str) -> Result<(), Error> {
        self.bind(function, [], 0).map(drop)
    }
}
