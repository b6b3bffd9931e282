//! Syntax tree of a template.

use std::sync::Arc;

pub type Body = Vec<Statement>;

#[derive(Debug)]
pub enum Statement {
    Data(Arc<str>),
    Print(Expr),
    For(Arc<For>),
    If {
        branches: Vec<(Expr, Body)>,
        otherwise: Body,
    },
    Set(Target, Expr),
    SetBlock {
        target: Target,
        filter: Option<Expr>,
        body: Body,
    },
    With {
        targets: Vec<(Target, Expr)>,
        body: Body,
    },
    FilterBlock {
        filter: Expr,
        body: Body,
    },
    Macro(Arc<Macro>),
    CallBlock {
        call: Expr,
        caller: Arc<Macro>,
    },
    /// A block with separate variables: `generation`, `block`, and `autoescape`.
    Scope(Body),
    /// Value of `{% autoescape %}`, which must be false.
    NoEscape(Expr),
    Break,
    Continue,
    /// A statement that needs other templates; there are none.
    Other {
        name: &'static str,
        template: Expr,
    },
}

#[derive(Debug)]
pub struct For {
    pub target: Target,
    pub items: Expr,
    pub test: Option<Expr>,
    pub recursive: bool,
    pub body: Body,
    pub otherwise: Body,
}

#[derive(Debug)]
pub struct Macro {
    pub name: Arc<str>,
    /// Names of the arguments; the last ones have `defaults`.
    pub arguments: Vec<Arc<str>>,
    pub defaults: Vec<Expr>,
    pub body: Body,
    pub takes: Takes,
}

/// Special variables that the body of a macro reads.
#[derive(Clone, Copy, Debug, Default)]
pub struct Takes {
    pub caller: bool,
    pub kwargs: bool,
    pub varargs: bool,
}

#[derive(Debug)]
pub enum Target {
    Name(Arc<str>),
    /// Attribute of a namespace.
    Attribute(Arc<str>, Arc<str>),
    Tuple(Vec<Target>),
}

#[derive(Clone, Debug)]
pub enum Const {
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Text(Arc<str>),
}

#[derive(Debug)]
pub enum Expr {
    Const(Const),
    Name(Arc<str>),
    Tuple(Vec<Expr>),
    List(Vec<Expr>),
    Dict(Vec<(Expr, Expr)>),
    Attribute(Box<Expr>, Arc<str>),
    Item(Box<Expr>, Box<Expr>),
    Slice(Box<[Option<Expr>; 3]>),
    Call(Box<Expr>, Arguments),
    /// A filter; one that begins the filters of a block has no input.
    Filter(Option<Box<Expr>>, Arc<str>, Arguments),
    Test(Box<Expr>, Arc<str>, Arguments),
    Not(Box<Expr>),
    Negative(Box<Expr>),
    Positive(Box<Expr>),
    Binary(Box<Expr>, Binary, Box<Expr>),
    And(Box<Expr>, Box<Expr>),
    Or(Box<Expr>, Box<Expr>),
    Compare(Box<Expr>, Vec<(Comparison, Expr)>),
    Concat(Vec<Expr>),
    Condition {
        test: Box<Expr>,
        then: Box<Expr>,
        otherwise: Option<Box<Expr>>,
    },
}

#[derive(Debug, Default)]
pub struct Arguments {
    pub positional: Vec<Expr>,
    pub named: Vec<(Arc<str>, Expr)>,
    /// `*list` and `**dict`.
    pub list: Option<Box<Expr>>,
    pub dict: Option<Box<Expr>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Binary {
    Add,
    Sub,
    Mul,
    Div,
    FloorDiv,
    Mod,
    Pow,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Comparison {
    Eq,
    Ne,
    Lt,
    Le,
    Gt,
    Ge,
    In,
    NotIn,
}
