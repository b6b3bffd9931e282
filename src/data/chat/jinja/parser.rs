//! Parser of statements.

use super::{
    Error,
    ast::{Arguments, Body, Expr, For, Macro, Statement, Takes, Target},
    lexer::{self, Kind, Token},
    names::is_filter,
};
use std::sync::Arc;

/// Parses a template.
///
/// # Errors
/// The line, and what stands there instead of what is expected.
pub fn parse(source: &str) -> Result<Body, Error> {
    let tokens = lexer::tokens(source)?;
    let mut parser =
        Parser { tokens, at: 0, loops: 0, depth: 0, unknown: Vec::new(), fatal: Vec::new(), reads: Takes::default() };
    let body = parser.body(&[])?;
    match parser.fatal.into_iter().chain(parser.unknown).next() {
        Some(error) => Err(error),
        None => Ok(body),
    }
}

/// Limit of operators, filters or attributes in a row.
const MAX_CHAIN: usize = 200;
/// Limit of expressions and blocks inside of each other.
pub(super) const MAX_NESTED: usize = 110;

/// Position in the tokens of a template.
pub struct Parser {
    tokens: Vec<Token>,
    at: usize,
    /// Number of loops around the current statement in its function.
    loops: usize,
    /// Unknown filters and tests. Those of a condition are errors only if they are reached, so they are removed at its end.
    pub(super) unknown: Vec<Error>,
    /// Unknown filters and tests of inner scopes, which are errors even inside a condition.
    fatal: Vec<Error>,
    pub(super) depth: usize,
    /// Special variables read in the current macro.
    pub(super) reads: Takes,
}

impl Parser {
    pub(super) fn peek(&self) -> &Kind {
        &self.tokens[self.at].kind
    }

    pub(super) fn look(&self) -> &Kind {
        &self.tokens[(self.at + 1).min(self.tokens.len() - 1)].kind
    }

    pub(super) fn next(&mut self) -> Kind {
        let kind = self.peek().clone();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        kind
    }

    pub(super) fn line(&self) -> usize {
        self.tokens[self.at].line
    }

    pub(super) fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::new(format!("line {}: {what}", self.line()))
    }

    fn expected(&self, what: &str) -> Error {
        let found = match self.peek() {
            Kind::Name(name) => format!("`{name}`"),
            Kind::Op(op) => format!("`{op}`"),
            Kind::Text(_) => "a string".into(),
            Kind::Int(_) | Kind::Float(_) => "a number".into(),
            Kind::End => "the end of the template".into(),
            _ => "the end of the tag".into(),
        };
        self.error(format!("expected {what}, found {found}"))
    }

    /// # Errors
    /// A chain of operators, filters or attributes that is too long.
    pub(super) fn link(&mut self, links: &mut usize) -> Result<(), Error> {
        *links += 1;
        if *links > MAX_CHAIN { Err(self.error("an expression is too long")) } else { Ok(()) }
    }

    pub(super) fn is_op(&self, op: &str) -> bool {
        matches!(self.peek(), Kind::Op(found) if *found == op)
    }

    pub(super) fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Kind::Name(found) if **found == *name)
    }

    pub(super) fn skip_op(&mut self, op: &str) -> bool {
        let found = self.is_op(op);
        if found {
            self.next();
        }
        found
    }

    pub(super) fn skip_name(&mut self, name: &str) -> bool {
        let found = self.is_name(name);
        if found {
            self.next();
        }
        found
    }

    pub(super) fn expect_op(&mut self, op: &str) -> Result<(), Error> {
        if self.skip_op(op) { Ok(()) } else { Err(self.expected(&format!("`{op}`"))) }
    }

    pub(super) fn expect_name(&mut self) -> Result<Arc<str>, Error> {
        match self.peek().clone() {
            Kind::Name(name) => {
                self.next();
                Ok(name)
            }
            _ => Err(self.expected("a name")),
        }
    }

    fn expect_word(&mut self, word: &str) -> Result<(), Error> {
        if self.skip_name(word) { Ok(()) } else { Err(self.expected(&format!("`{word}`"))) }
    }

    pub(super) fn expect(&mut self, kind: &Kind) -> Result<(), Error> {
        if self.peek() != kind {
            return Err(self.expected("the end of the tag"));
        }
        self.next();
        Ok(())
    }

    /// Statements up to one of the tags `ends`, or to the end of the template. The tag's name is the current token.
    fn body(&mut self, ends: &[&str]) -> Result<Body, Error> {
        let mut body = Vec::new();
        loop {
            match self.peek().clone() {
                Kind::Data(text) => {
                    self.next();
                    body.push(Statement::Data(text));
                }
                Kind::VariableBegin => {
                    self.next();
                    body.push(Statement::Print(self.tuple(true, &[], false)?));
                    self.expect(&Kind::VariableEnd)?;
                }
                Kind::BlockBegin => {
                    self.next();
                    if ends.iter().any(|end| self.is_name(end)) {
                        return Ok(body);
                    }
                    self.statement(&mut body)?;
                    self.expect(&Kind::BlockEnd)?;
                }
                _ if ends.is_empty() => return Ok(body),
                _ => return Err(self.expected(&format!("the tag `{}`", ends.join("` or `")))),
            }
        }
    }

    /// Body of a statement, after its tag. The name of the end tag is the current token.
    fn inner(&mut self, ends: &[&str]) -> Result<Body, Error> {
        self.skip_op(":");
        self.expect(&Kind::BlockEnd)?;
        self.depth += 1;
        if self.depth > MAX_NESTED {
            return Err(self.error("blocks are nested too deeply"));
        }
        let body = self.body(ends);
        self.depth -= 1;
        body
    }

    fn inner_to(&mut self, end: &str) -> Result<Body, Error> {
        let body = self.inner(&[end])?;
        self.next();
        Ok(body)
    }

    /// Body of a statement with separate variables.
    fn scope(&mut self, ends: &[&str]) -> Result<Body, Error> {
        let known = self.unknown.len();
        let body = self.inner(ends)?;
        self.fatal.extend(self.unknown.drain(known..));
        Ok(body)
    }

    fn scope_to(&mut self, end: &str) -> Result<Body, Error> {
        let body = self.scope(&[end])?;
        self.next();
        Ok(body)
    }

    fn statement(&mut self, out: &mut Body) -> Result<(), Error> {
        let Kind::Name(tag) = self.peek().clone() else { return Err(self.expected("the name of a tag")) };
        self.next();
        out.push(match &*tag {
            "for" => self.for_loop()?,
            "if" => self.condition()?,
            "set" => self.set()?,
            "with" => self.with()?,
            "macro" => Statement::Macro(Arc::new(self.macro_()?)),
            "call" => self.call_block()?,
            "filter" => {
                let filter = self.filters(None, true)?;
                Statement::FilterBlock { filter, body: self.scope_to("endfilter")? }
            }
            "generation" => {
                let loops = std::mem::take(&mut self.loops);
                let body = self.scope_to("endgeneration")?;
                self.loops = loops;
                Statement::Scope(body)
            }
            "block" => {
                let name = self.expect_name()?;
                self.skip_name("scoped");
                self.skip_name("required");
                let body = self.scope_to("endblock")?;
                self.skip_name(&name);
                Statement::Scope(body)
            }
            "autoescape" => {
                let mut body = vec![Statement::NoEscape(self.expression(true)?)];
                body.extend(self.scope_to("endautoescape")?);
                Statement::Scope(body)
            }
            "print" => {
                while !matches!(self.peek(), Kind::BlockEnd) {
                    if !out.is_empty() && matches!(self.peek(), Kind::Op(",")) {
                        self.next();
                    }
                    let value = self.expression(true)?;
                    out.push(Statement::Print(value));
                }
                return Ok(());
            }
            "break" | "continue" if self.loops == 0 => return Err(self.error(format!("`{tag}` outside of a loop"))),
            "break" => Statement::Break,
            "continue" => Statement::Continue,
            "include" | "import" | "extends" | "from" => {
                let name = ["include", "import", "extends", "from"].into_iter().find(|name| **name == *tag);
                let template = self.expression(true)?;
                while !matches!(self.peek(), Kind::BlockEnd | Kind::End) {
                    self.next();
                }
                Statement::Other { name: name.unwrap_or_default(), template }
            }
            _ => return Err(self.error(format!("the tag `{tag}` is unknown"))),
        });
        Ok(())
    }

    fn for_loop(&mut self) -> Result<Statement, Error> {
        let target = self.target(&["in"])?;
        self.expect_word("in")?;
        let items = self.tuple(false, &["recursive"], false)?;
        let test = if self.skip_name("if") { Some(self.expression(true)?) } else { None };
        let recursive = self.skip_name("recursive");
        self.loops += 1;
        let body = self.scope(&["endfor", "else"])?;
        self.loops -= 1;
        let has_else = self.is_name("else");
        self.next();
        let otherwise = if has_else { self.scope_to("endfor")? } else { Vec::new() };
        Ok(Statement::For(Arc::new(For { target, items, test, recursive, body, otherwise })))
    }

    fn condition(&mut self) -> Result<Statement, Error> {
        let mut branches = Vec::new();
        let known = self.unknown.len();
        let otherwise = loop {
            let test = self.tuple(false, &[], false)?;
            branches.push((test, self.inner(&["elif", "else", "endif"])?));
            if self.skip_name("elif") {
                continue;
            }
            let has_else = self.is_name("else");
            self.next();
            break if has_else { self.inner_to("endif")? } else { Vec::new() };
        };
        self.unknown.truncate(known);
        Ok(Statement::If { branches, otherwise })
    }

    fn set(&mut self) -> Result<Statement, Error> {
        let target = self.target_or_attribute()?;
        if self.skip_op("=") {
            return Ok(Statement::Set(target, self.tuple(true, &[], false)?));
        }
        let filter = if self.is_op("|") { Some(self.filters(None, false)?) } else { None };
        Ok(Statement::SetBlock { target, filter, body: self.scope_to("endset")? })
    }

    fn with(&mut self) -> Result<Statement, Error> {
        let mut targets = Vec::new();
        while !matches!(self.peek(), Kind::BlockEnd) {
            if !targets.is_empty() {
                self.expect_op(",")?;
            }
            let target = self.target(&[])?;
            self.expect_op("=")?;
            targets.push((target, self.expression(true)?));
        }
        Ok(Statement::With { targets, body: self.scope_to("endwith")? })
    }

    fn macro_(&mut self) -> Result<Macro, Error> {
        let name = self.name_target()?;
        let (arguments, defaults) = self.signature()?;
        self.function(name, arguments, defaults, "endmacro")
    }

    fn call_block(&mut self) -> Result<Statement, Error> {
        let (arguments, defaults) = if self.is_op("(") { self.signature()? } else { Default::default() };
        let call = self.expression(true)?;
        if !matches!(call, Expr::Call(..)) {
            return Err(self.error("`call` needs a call of a macro"));
        }
        let caller = self.function("caller".into(), arguments, defaults, "endcall")?;
        Ok(Statement::CallBlock { call, caller: Arc::new(caller) })
    }

    fn function(
        &mut self,
        name: Arc<str>,
        arguments: Vec<Arc<str>>,
        defaults: Vec<Expr>,
        end: &str,
    ) -> Result<Macro, Error> {
        let loops = std::mem::take(&mut self.loops);
        let outer = std::mem::take(&mut self.reads);
        let body = self.scope_to(end)?;
        let mut takes = std::mem::replace(&mut self.reads, outer);
        self.loops = loops;
        let named = |special: &str| arguments.iter().any(|name| **name == *special);
        takes.caller &= !named("caller");
        takes.kwargs &= !named("kwargs");
        takes.varargs &= !named("varargs");
        // The outer macro reads all that an inner one reads.
        self.reads.caller |= takes.caller;
        self.reads.kwargs |= takes.kwargs;
        self.reads.varargs |= takes.varargs;
        Ok(Macro { name, arguments, defaults, body, takes })
    }

    fn signature(&mut self) -> Result<(Vec<Arc<str>>, Vec<Expr>), Error> {
        let (mut arguments, mut defaults) = (Vec::new(), Vec::new());
        self.expect_op("(")?;
        while !self.is_op(")") {
            if !arguments.is_empty() {
                self.expect_op(",")?;
            }
            arguments.push(self.name_target()?);
            if self.skip_op("=") {
                defaults.push(self.expression(true)?);
            } else if !defaults.is_empty() {
                return Err(self.error("an argument without a default follows one with a default"));
            }
        }
        self.expect_op(")")?;
        Ok((arguments, defaults))
    }

    fn name_target(&mut self) -> Result<Arc<str>, Error> {
        let name = self.expect_name()?;
        if is_constant(&name) {
            return Err(self.error(format!("`{name}` cannot be assigned")));
        }
        Ok(name)
    }

    fn target_or_attribute(&mut self) -> Result<Target, Error> {
        self.targets(&[], true)
    }

    fn target(&mut self, ends: &[&str]) -> Result<Target, Error> {
        self.targets(ends, false)
    }

    fn targets(&mut self, ends: &[&str], attributes: bool) -> Result<Target, Error> {
        let mut all = Vec::new();
        let mut is_tuple = false;
        loop {
            if matches!(self.peek(), Kind::BlockEnd | Kind::VariableEnd)
                || self.is_op(")")
                || ends.iter().any(|end| self.is_name(end))
            {
                break;
            }
            all.push(self.one_target(attributes)?);
            if !self.skip_op(",") {
                break;
            }
            is_tuple = true;
        }
        match all.pop() {
            Some(target) if !is_tuple => Ok(target),
            Some(target) => {
                all.push(target);
                Ok(Target::Tuple(all))
            }
            None => Err(self.expected("a name")),
        }
    }

    fn one_target(&mut self, attributes: bool) -> Result<Target, Error> {
        if self.skip_op("(") {
            let target = self.targets(&[], attributes)?;
            self.expect_op(")")?;
            return Ok(target);
        }
        let name = self.name_target()?;
        if attributes && self.skip_op(".") {
            return Ok(Target::Attribute(name, self.expect_name()?));
        }
        Ok(Target::Name(name))
    }

    /// Filters `| name(arguments)`, on `input`. `named` states that the first filter has no `|`.
    pub(super) fn filters(&mut self, input: Option<Expr>, mut named: bool) -> Result<Expr, Error> {
        let mut input = input;
        let mut links = 0;
        while named || self.is_op("|") {
            if !named {
                self.next();
            }
            named = false;
            self.link(&mut links)?;
            let name = self.dotted()?;
            if !is_filter(&name) {
                self.unknown.push(self.error(format!("the filter `{name}` is unknown")));
            }
            let arguments = if self.is_op("(") { self.arguments()? } else { Arguments::default() };
            input = Some(Expr::Filter(input.map(Box::new), name, arguments));
        }
        input.ok_or_else(|| self.expected("a filter"))
    }

    /// A name with dots, as filters and tests may have.
    pub(super) fn dotted(&mut self) -> Result<Arc<str>, Error> {
        let mut name = self.expect_name()?.to_string();
        while self.skip_op(".") {
            name.push('.');
            name.push_str(&self.expect_name()?);
        }
        Ok(name.into())
    }
}

pub(super) fn is_constant(name: &str) -> bool {
    matches!(name, "true" | "false" | "none" | "True" | "False" | "None")
}
