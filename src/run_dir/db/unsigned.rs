//! Unsigned numbers in SQLite, whose integers are signed.

use rusqlite::{
    ToSql,
    types::{FromSql, FromSqlError, FromSqlResult, ToSqlOutput, ValueRef},
};

/// A number in 0..2^63. Storing or reading a number outside the range fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unsigned(pub u64);

impl ToSql for Unsigned {
    fn to_sql(&self) -> rusqlite::Result<ToSqlOutput<'_>> {
        let signed = i64::try_from(self.0).map_err(|error| rusqlite::Error::ToSqlConversionFailure(error.into()))?;
        Ok(signed.into())
    }
}

impl FromSql for Unsigned {
    fn column_result(value: ValueRef<'_>) -> FromSqlResult<Self> {
        let signed = i64::column_result(value)?;
        u64::try_from(signed).map(Unsigned).map_err(|_| FromSqlError::OutOfRange(signed))
    }
}
