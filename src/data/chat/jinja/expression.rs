//! Parser of expressions.

use super::{
    Error,
    ast::{Arguments, Binary, Comparison, Const, Expr},
    lexer::Kind,
    names::is_test,
    parser::{MAX_NESTED, Parser},
};

impl Parser {
    /// An expression; `conditional` allows `a if b else c`.
    pub(super) fn expression(&mut self, conditional: bool) -> Result<Expr, Error> {
        self.depth += 1;
        if self.depth > MAX_NESTED {
            return Err(self.error("an expression is nested too deeply"));
        }
        let found = if conditional { self.condition_expression() } else { self.or() };
        self.depth -= 1;
        found
    }

    /// An expression, or several with commas: a tuple. `ends` are names that may follow a comma.
    pub(super) fn tuple(&mut self, conditional: bool, ends: &[&str], parentheses: bool) -> Result<Expr, Error> {
        let mut items = Vec::new();
        let mut is_tuple = false;
        loop {
            if matches!(self.peek(), Kind::BlockEnd | Kind::VariableEnd)
                || self.is_op(")")
                || ends.iter().any(|end| self.is_name(end))
            {
                break;
            }
            items.push(self.expression(conditional)?);
            if !self.skip_op(",") {
                break;
            }
            is_tuple = true;
        }
        match items.pop() {
            Some(item) if !is_tuple => Ok(item),
            None if !parentheses => Err(self.error("an expression is missing")),
            last => {
                items.extend(last);
                Ok(Expr::Tuple(items))
            }
        }
    }

    fn condition_expression(&mut self) -> Result<Expr, Error> {
        let known = self.unknown.len();
        let mut first = self.or()?;
        let mut links = 0;
        while self.skip_name("if") {
            self.link(&mut links)?;
            let test = Box::new(self.or()?);
            let otherwise = if self.skip_name("else") { Some(Box::new(self.expression(true)?)) } else { None };
            first = Expr::Condition { test, then: Box::new(first), otherwise };
            self.unknown.truncate(known);
        }
        Ok(first)
    }

    fn or(&mut self) -> Result<Expr, Error> {
        let mut left = self.and()?;
        let mut links = 0;
        while self.skip_name("or") {
            self.link(&mut links)?;
            left = Expr::Or(Box::new(left), Box::new(self.and()?));
        }
        Ok(left)
    }

    fn and(&mut self) -> Result<Expr, Error> {
        let mut left = self.not()?;
        let mut links = 0;
        while self.skip_name("and") {
            self.link(&mut links)?;
            left = Expr::And(Box::new(left), Box::new(self.not()?));
        }
        Ok(left)
    }

    fn not(&mut self) -> Result<Expr, Error> {
        let mut count = 0;
        while self.skip_name("not") {
            self.link(&mut count)?;
        }
        let inner = self.compare()?;
        Ok((0..count).fold(inner, |inner, _| Expr::Not(Box::new(inner))))
    }

    fn compare(&mut self) -> Result<Expr, Error> {
        let first = self.sum()?;
        let mut others = Vec::new();
        loop {
            let comparison = match self.peek() {
                Kind::Op("==") => Comparison::Eq,
                Kind::Op("!=") => Comparison::Ne,
                Kind::Op("<") => Comparison::Lt,
                Kind::Op("<=") => Comparison::Le,
                Kind::Op(">") => Comparison::Gt,
                Kind::Op(">=") => Comparison::Ge,
                Kind::Name(name) if **name == *"in" => Comparison::In,
                Kind::Name(name) if **name == *"not" && matches!(self.look(), Kind::Name(n) if **n == *"in") => {
                    self.next();
                    Comparison::NotIn
                }
                _ => break,
            };
            self.next();
            others.push((comparison, self.sum()?));
        }
        Ok(if others.is_empty() { first } else { Expr::Compare(Box::new(first), others) })
    }

    fn sum(&mut self) -> Result<Expr, Error> {
        let mut left = self.concat()?;
        let mut links = 0;
        loop {
            let op = match self.peek() {
                Kind::Op("+") => Binary::Add,
                Kind::Op("-") => Binary::Sub,
                _ => return Ok(left),
            };
            self.next();
            self.link(&mut links)?;
            left = Expr::Binary(Box::new(left), op, Box::new(self.concat()?));
        }
    }

    fn concat(&mut self) -> Result<Expr, Error> {
        let first = self.product()?;
        if !self.is_op("~") {
            return Ok(first);
        }
        let mut all = vec![first];
        while self.skip_op("~") {
            all.push(self.product()?);
        }
        Ok(Expr::Concat(all))
    }

    fn product(&mut self) -> Result<Expr, Error> {
        let mut left = self.power()?;
        let mut links = 0;
        loop {
            let op = match self.peek() {
                Kind::Op("*") => Binary::Mul,
                Kind::Op("/") => Binary::Div,
                Kind::Op("//") => Binary::FloorDiv,
                Kind::Op("%") => Binary::Mod,
                _ => return Ok(left),
            };
            self.next();
            self.link(&mut links)?;
            left = Expr::Binary(Box::new(left), op, Box::new(self.power()?));
        }
    }

    fn power(&mut self) -> Result<Expr, Error> {
        let mut left = self.unary(true)?;
        let mut links = 0;
        while self.skip_op("**") {
            self.link(&mut links)?;
            left = Expr::Binary(Box::new(left), Binary::Pow, Box::new(self.unary(true)?));
        }
        Ok(left)
    }

    fn unary(&mut self, filters: bool) -> Result<Expr, Error> {
        self.depth += 1;
        if self.depth > MAX_NESTED {
            return Err(self.error("an expression is nested too deeply"));
        }
        let inner = if self.skip_op("-") {
            Expr::Negative(Box::new(self.unary(false)?))
        } else if self.skip_op("+") {
            Expr::Positive(Box::new(self.unary(false)?))
        } else {
            self.primary()?
        };
        self.depth -= 1;
        let inner = self.postfix(inner)?;
        if filters { self.filters_and_tests(inner) } else { Ok(inner) }
    }

    fn primary(&mut self) -> Result<Expr, Error> {
        Ok(match self.next() {
            Kind::Name(name) => match &*name {
                "true" | "True" => Expr::Const(Const::Bool(true)),
                "false" | "False" => Expr::Const(Const::Bool(false)),
                "none" | "None" => Expr::Const(Const::None),
                special => {
                    self.reads.caller |= special == "caller";
                    self.reads.kwargs |= special == "kwargs";
                    self.reads.varargs |= special == "varargs";
                    Expr::Name(name)
                }
            },
            Kind::Text(mut text) => {
                while let Kind::Text(more) = self.peek() {
                    text.push_str(more);
                    self.next();
                }
                Expr::Const(Const::Text(text.into()))
            }
            Kind::Int(value) => Expr::Const(Const::Int(value)),
            Kind::Float(value) => Expr::Const(Const::Float(value)),
            Kind::Op("(") => {
                let inner = self.tuple(true, &[], true)?;
                self.expect_op(")")?;
                inner
            }
            Kind::Op("[") => {
                let mut items = Vec::new();
                while !self.is_op("]") {
                    items.push(self.expression(true)?);
                    if !self.skip_op(",") {
                        break;
                    }
                }
                self.expect_op("]")?;
                Expr::List(items)
            }
            Kind::Op("{") => {
                let mut items = Vec::new();
                while !self.is_op("}") {
                    let key = self.expression(true)?;
                    self.expect_op(":")?;
                    items.push((key, self.expression(true)?));
                    if !self.skip_op(",") {
                        break;
                    }
                }
                self.expect_op("}")?;
                Expr::Dict(items)
            }
            _ => return Err(self.error("an expression is missing")),
        })
    }

    fn postfix(&mut self, mut inner: Expr) -> Result<Expr, Error> {
        let mut links = 0;
        loop {
            self.link(&mut links)?;
            if self.skip_op(".") {
                inner = match self.next() {
                    Kind::Name(name) => Expr::Attribute(Box::new(inner), name),
                    Kind::Int(index) => Expr::Item(Box::new(inner), Box::new(Expr::Const(Const::Int(index)))),
                    _ => return Err(self.error("a name or a number must follow a dot")),
                };
            } else if self.skip_op("[") {
                let mut keys = Vec::new();
                while !self.is_op("]") {
                    if !keys.is_empty() {
                        self.expect_op(",")?;
                    }
                    keys.push(self.subscript()?);
                }
                self.expect_op("]")?;
                if keys.len() > 1 && keys.iter().any(|key| matches!(key, Expr::Slice(_))) {
                    return Err(self.error("a slice stands beside other keys"));
                }
                let key = match keys.pop() {
                    Some(key) if keys.is_empty() => key,
                    last => {
                        keys.extend(last);
                        Expr::Tuple(keys)
                    }
                };
                inner = Expr::Item(Box::new(inner), Box::new(key));
            } else if self.is_op("(") {
                inner = Expr::Call(Box::new(inner), self.arguments()?);
            } else {
                return Ok(inner);
            }
        }
    }

    fn subscript(&mut self) -> Result<Expr, Error> {
        let first = if self.is_op(":") { None } else { Some(self.expression(true)?) };
        if !self.skip_op(":") {
            return first.ok_or_else(|| self.error("an expression is missing"));
        }
        let stop = self.bound()?;
        let step = if self.skip_op(":") { self.bound()? } else { None };
        Ok(Expr::Slice(Box::new([first, stop, step])))
    }

    /// Second or third part of a slice.
    fn bound(&mut self) -> Result<Option<Expr>, Error> {
        match self.peek() {
            Kind::Op(":" | "]" | ",") => Ok(None),
            _ => self.expression(true).map(Some),
        }
    }

    fn filters_and_tests(&mut self, mut inner: Expr) -> Result<Expr, Error> {
        let mut links = 0;
        loop {
            self.link(&mut links)?;
            if self.is_op("|") {
                inner = self.filters(Some(inner), false)?;
            } else if self.skip_name("is") {
                inner = self.test(inner)?;
            } else if self.is_op("(") {
                inner = Expr::Call(Box::new(inner), self.arguments()?);
            } else {
                return Ok(inner);
            }
        }
    }

    fn test(&mut self, inner: Expr) -> Result<Expr, Error> {
        let negated = self.skip_name("not");
        let name = match self.peek() {
            // Operators are names of tests, but the grammar takes names only.
            Kind::Name(_) => self.dotted()?,
            _ => return Err(self.error("the name of a test must follow `is`")),
        };
        if !is_test(&name) {
            self.unknown.push(self.error(format!("the test `{name}` is unknown")));
        }
        let takes_argument = match self.peek() {
            Kind::Name(next) => match &**next {
                "else" | "or" | "and" => false,
                "is" => return Err(self.error("tests cannot be chained with `is`")),
                _ => true,
            },
            Kind::Text(_) | Kind::Int(_) | Kind::Float(_) | Kind::Op("[" | "{") => true,
            _ => false,
        };
        let mut arguments = Arguments::default();
        if self.is_op("(") {
            arguments = self.arguments()?;
        } else if takes_argument {
            let argument = self.primary()?;
            arguments.positional.push(self.postfix(argument)?);
        }
        let test = Expr::Test(Box::new(inner), name, arguments);
        Ok(if negated { Expr::Not(Box::new(test)) } else { test })
    }

    /// Arguments of a call, in parentheses.
    pub(super) fn arguments(&mut self) -> Result<Arguments, Error> {
        let mut all = Arguments::default();
        self.expect_op("(")?;
        while !self.is_op(")") {
            let invalid = if self.skip_op("*") {
                let twice = all.list.is_some() || all.dict.is_some();
                all.list = Some(Box::new(self.expression(true)?));
                twice
            } else if self.skip_op("**") {
                let twice = all.dict.is_some();
                all.dict = Some(Box::new(self.expression(true)?));
                twice
            } else if matches!((self.peek(), self.look()), (Kind::Name(_), Kind::Op("="))) {
                let name = self.expect_name()?;
                self.next();
                let twice = all.dict.is_some() || all.named.iter().any(|(known, _)| *known == name);
                all.named.push((name, self.expression(true)?));
                twice
            } else {
                let late = all.list.is_some() || all.dict.is_some() || !all.named.is_empty();
                all.positional.push(self.expression(true)?);
                late
            };
            if invalid {
                return Err(self.error("the arguments of a call are in the wrong order, or one is given twice"));
            }
            if !self.skip_op(",") {
                break;
            }
        }
        self.expect_op(")")?;
        Ok(all)
    }
}
