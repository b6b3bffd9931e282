//! Text of a response with its drafted tokens marked.

use super::record::Shown;
#[cfg(any(test, feature = "torch"))]
use super::record::{Piece, Step};
use std::fmt::Write;

/// Marks around drafted tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// Green, for a terminal.
    Colour,
    /// Brackets, for a file or a pipe.
    Brackets,
}

/// Characters of a prompt that are shown.
const PROMPT: usize = 100;

/// Splits a response of `tokens` by origin. The first token and the last one of most steps are the target's own. `decode`
/// gives the text of the first tokens of the response.
///
/// # Errors
/// Returns the error of `decode`.
#[cfg(any(test, feature = "torch"))]
pub fn pieces<E>(
    tokens: &[u32],
    steps: &[Step],
    mut decode: impl FnMut(&[u32]) -> Result<String, E>,
) -> Result<Vec<Piece>, E> {
    let mut runs = vec![(1, false)];
    for step in steps {
        runs.push((step.accepted, true));
        runs.push((step.produced - step.accepted, false));
    }
    let (mut found, mut end, mut before) = (Vec::<Piece>::new(), 0, String::new());
    for (count, drafted) in runs.into_iter().filter(|&(count, _)| count > 0) {
        end = (end + count).min(tokens.len());
        let whole = decode(&tokens[..end])?;
        // A character may need several tokens; until its last one the text ends with a replacement character.
        let same = whole.char_indices().zip(before.chars()).find(|((_, new), old)| new != old).map(|((at, _), _)| at);
        let text = whole[same.unwrap_or(before.len().min(whole.len()))..].trim_end_matches('\u{fffd}').to_owned();
        before = whole.trim_end_matches('\u{fffd}').to_owned();
        match found.last_mut() {
            Some(last) if last.drafted == drafted => last.text.push_str(&text),
            _ => found.push(Piece { text, drafted }),
        }
    }
    Ok(found)
}

impl Shown {
    /// Text of the prompt's beginning and of the response, with `marks` around drafted tokens.
    pub fn text(&self, marks: Marks) -> String {
        let (open, close) = match marks {
            Marks::Colour => ("\x1b[1;32m", "\x1b[0m"),
            Marks::Brackets => ("[", "]"),
        };
        let line = self.prompt.split_whitespace().collect::<Vec<_>>().join(" ");
        let mut out: String = line.chars().take(PROMPT).collect();
        if line.chars().count() > PROMPT {
            out.push('…');
        }
        out.push_str("\n  ");
        for piece in &self.pieces {
            // A terminal ends a colour at a line break, and a response must not set colours itself.
            let text: String = piece.text.chars().filter(|c| *c == '\n' || !c.is_control()).collect();
            for (at, line) in text.split('\n').enumerate() {
                if at > 0 {
                    out.push_str("\n  ");
                }
                if piece.drafted && !line.is_empty() {
                    let _ = write!(out, "{open}{line}{close}");
                } else {
                    out.push_str(line);
                }
            }
        }
        out.push('\n');
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::convert::Infallible;

    fn step(drafted: usize, accepted: usize, produced: usize) -> Step {
        Step { drafted, accepted, produced }
    }

    /// Decodes bytes, as a byte-level tokenizer does.
    fn bytes(tokens: &[u32]) -> Result<String, Infallible> {
        let bytes: Vec<u8> = tokens.iter().map(|&token| token as u8).collect();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn split(text: &str, steps: &[Step]) -> Vec<(String, bool)> {
        let tokens: Vec<u32> = text.bytes().map(u32::from).collect();
        let Ok(pieces) = pieces(&tokens, steps, bytes);
        pieces.into_iter().map(|piece| (piece.text, piece.drafted)).collect()
    }

    #[test]
    fn tokens_are_split_by_their_origin() {
        let own = |text: &str| (text.to_owned(), false);
        let drafted = |text: &str| (text.to_owned(), true);
        let found = split("abcdefg", &[step(3, 0, 1), step(3, 2, 3), step(3, 2, 2)]);
        assert_eq!(found, [own("ab"), drafted("cd"), own("e"), drafted("fg")]);
    }

    #[test]
    fn a_character_of_several_tokens_appears_once_and_whole() {
        let text = "a\u{20ac}b";
        let found = split(text, &[step(2, 1, 2), step(2, 1, 2)]);
        assert_eq!(found.iter().map(|(text, _)| text.as_str()).collect::<String>(), text);
        assert!(found.iter().all(|(text, _)| !text.contains('\u{fffd}')), "{found:?}");
    }

    #[test]
    fn drafted_tokens_are_marked_line_by_line() {
        let piece = |text: &str, drafted| Piece { text: text.into(), drafted };
        let shown = Shown { prompt: "Say\nit".into(), pieces: vec![piece("a", false), piece("b\nc\x1b[31m", true)] };
        assert_eq!(shown.text(Marks::Brackets), "Say it\n  a[b]\n  [c[31m]\n");
        assert!(shown.text(Marks::Colour).contains("a\x1b[1;32mb\x1b[0m\n"));
        let long = Shown { prompt: "x".repeat(200), ..Shown::default() };
        assert!(long.text(Marks::Brackets).starts_with(&format!("{}…\n", "x".repeat(100))));
    }
}
