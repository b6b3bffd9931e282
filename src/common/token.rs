//! Access token of the HTTP port.

use super::fs::read_input_text;
use sha2::{Digest, Sha256};
use std::{fmt, path::Path};

/// Minimum length of a token in characters, against guessing.
const MIN_LENGTH: usize = 16;

/// Maximum size of a token file in bytes.
const MAX_FILE: u64 = 64 << 10;

/// Secret of the HTTP port's commands. Stores only a hash, so that no log and no dump contains the secret.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// Token with this secret.
    pub fn new(secret: &str) -> Token {
        Token(Sha256::digest(secret.as_bytes()).into())
    }

    /// Reads the file of `admin.token_file`: one token; surrounding white space is ignored.
    ///
    /// # Errors
    /// A sentence about the file: unreadable, or no valid token.
    pub fn read(path: &Path) -> Result<Token, String> {
        let text = read_input_text(path, MAX_FILE).map_err(|error| format!("it cannot be read: {error}"))?;
        let secret = text.trim();
        match secret.len() >= MIN_LENGTH && secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Token::new(secret)),
            false => Err(format!(
                "it holds no token: expected at least {MIN_LENGTH} letters, digits and signs without blanks"
            )),
        }
    }

    /// True if the secret is this token's. Compares in constant time.
    pub fn matches(&self, secret: &str) -> bool {
        let other = Token::new(secret);
        self.0.iter().zip(other.0).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
