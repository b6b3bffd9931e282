//! Access token of the HTTP port.

use sha2::{Digest, Sha256};
use std::{fmt, path::Path};

/// Shorter tokens can be guessed.
const SHORTEST: usize = 16;

/// The secret that orders must carry. Only its hash is kept, so that no log and no dump tells it.
#[derive(Clone)]
pub struct Token([u8; 32]);

impl Token {
    /// The token itself.
    pub fn new(secret: &str) -> Token {
        Token(Sha256::digest(secret.as_bytes()).into())
    }

    /// Reads the file of `admin.token_file`: one token, blanks around it do not count. The error says what is wrong with the file.
    pub fn read(path: &Path) -> Result<Token, String> {
        let text = std::fs::read_to_string(path).map_err(|error| format!("it cannot be read: {error}"))?;
        let secret = text.trim();
        match secret.len() >= SHORTEST && secret.bytes().all(|byte| byte.is_ascii_graphic()) {
            true => Ok(Token::new(secret)),
            false => Err(format!("it holds no token: at least {SHORTEST} letters, digits and signs, without blanks")),
        }
    }

    /// Takes the same time whatever is wrong: hashes of one length are compared to their end.
    pub fn is(&self, secret: &str) -> bool {
        let other = Token::new(secret);
        self.0.iter().zip(other.0).fold(0, |difference, (a, b)| difference | (a ^ b)) == 0
    }
}

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Token(..)")
    }
}
