//! Cuts a stream of JSON into rows without holding more than one: the elements of an array, or the lines of JSONL.
//!
//! The first byte that is not a space decides between the two formats. Only brackets and strings delimit rows; the reader of
//! a row checks its JSON. Damage stays within its row if possible: a closing bracket closes the innermost bracket of its
//! kind, a string ends with its line, and an opening bracket between two elements starts a row even without a comma.

/// A row as bytes of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawRow {
    /// Line of its first byte, from 1.
    pub line: u64,
    /// The file ended before a comma, bracket or newline ended the row.
    pub truncated: bool,
    pub content: RowContent,
}

/// Content of a row, or its size if it exceeds the limit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RowContent {
    /// Bytes of the row, without surrounding white space.
    Bytes(Vec<u8>),
    /// Size of a row that exceeds `max_row_bytes`; its bytes were dropped.
    TooLarge { bytes: u64 },
}

impl RowContent {
    /// Bytes of the row; `None` if it was too large.
    pub fn bytes(&self) -> Option<&[u8]> {
        match self {
            RowContent::Bytes(bytes) => Some(bytes),
            RowContent::TooLarge { .. } => None,
        }
    }

    /// Number of bytes in memory.
    pub fn kept_bytes(&self) -> usize {
        self.bytes().map_or(0, <[u8]>::len)
    }
}

/// Incremental splitter: finds rows in the bytes passed to [`Splitter::feed`].
#[derive(Debug)]
pub struct Splitter {
    max_row_bytes: u64,
    mode: Mode,
    /// Bytes read at the start of the file; only the byte order mark needs the number.
    seen: usize,
    /// Line of the next byte, from 1.
    line: u64,
    row: Vec<u8>,
    row_line: u64,
    /// Bytes of the row, including dropped ones.
    row_bytes: u64,
    nesting: Nesting,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// Before the first byte of a document.
    Start,
    Lines,
    Array,
}

/// Position of the next byte within an element of an array.
#[derive(Debug, Default)]
struct Nesting {
    in_string: bool,
    escaped: bool,
    /// Closing bytes of the open brackets, outermost first.
    closers: Vec<u8>,
    /// Open brackets beyond [`REMEMBERED_DEPTH`]; only their number is stored, so that memory stays bounded.
    deeper: u64,
}

const BYTE_ORDER_MARK: [u8; 3] = [0xef, 0xbb, 0xbf];
/// Depth of brackets whose kinds are stored; more than serde_json accepts.
const REMEMBERED_DEPTH: usize = 256;

impl Splitter {
    /// Creates a splitter that drops the bytes of rows above `max_row_bytes` and counts them.
    pub fn new(max_row_bytes: u64) -> Splitter {
        Splitter {
            max_row_bytes,
            mode: Mode::Start,
            seen: 0,
            line: 1,
            row: Vec::new(),
            row_line: 1,
            row_bytes: 0,
            nesting: Nesting::default(),
        }
    }

    /// Reads until a row is complete or `bytes` ends. Returns the number of bytes read and the row.
    pub fn feed(&mut self, bytes: &[u8]) -> (usize, Option<RawRow>) {
        let mut at = 0;
        while at < bytes.len() {
            let rest = &bytes[at..];
            let (used, row) = match self.mode {
                Mode::Start => self.begin(rest[0]),
                Mode::Lines => self.line(rest),
                Mode::Array if self.nesting.in_string => self.string(rest),
                Mode::Array => self.element(rest[0]),
            };
            at += used;
            if row.is_some() {
                return (at, row);
            }
        }
        (at, None)
    }

    /// True if an array has begun and not ended.
    pub fn in_array(&self) -> bool {
        self.mode == Mode::Array
    }

    /// Line of the next byte, from 1.
    pub fn current_line(&self) -> u64 {
        self.line
    }

    /// Ends the file and returns its last row, if any. `cut` states that the file ended too early.
    ///
    /// If an end is missing between rows, returns an empty truncated row, so that the lost rows are reported.
    pub fn finish(&mut self, cut: bool) -> Option<RawRow> {
        let line = self.line;
        let empty = (cut || self.mode == Mode::Array).then(|| RawRow {
            line,
            truncated: true,
            content: RowContent::Bytes(Vec::new()),
        });
        self.mode = Mode::Start;
        self.nesting = Nesting::default();
        self.take(true).or(empty)
    }

    fn begin(&mut self, byte: u8) -> (usize, Option<RawRow>) {
        let mark = BYTE_ORDER_MARK.get(self.seen) == Some(&byte);
        self.seen = self.seen.saturating_add(1);
        match byte {
            b'[' => self.mode = Mode::Array,
            _ if mark || is_space(byte) => self.line += u64::from(byte == b'\n'),
            _ => {
                self.mode = Mode::Lines;
                return (0, None);
            }
        }
        (1, None)
    }

    fn line(&mut self, bytes: &[u8]) -> (usize, Option<RawRow>) {
        let Some(end) = bytes.iter().position(|&byte| byte == b'\n') else {
            self.push(bytes);
            return (bytes.len(), None);
        };
        self.push(&bytes[..end]);
        self.line += 1;
        (end + 1, self.take(false))
    }

    fn string(&mut self, bytes: &[u8]) -> (usize, Option<RawRow>) {
        if std::mem::take(&mut self.nesting.escaped) && bytes[0] != b'\n' {
            self.push(&bytes[..1]);
            return (1, None);
        }
        let end = bytes.iter().position(|byte| matches!(byte, b'"' | b'\\' | b'\n'));
        let used = end.map_or(bytes.len(), |end| end + 1);
        self.push(&bytes[..used]);
        match end.map(|end| bytes[end]) {
            Some(b'\\') => self.nesting.escaped = true,
            Some(b'"') => self.nesting.in_string = false,
            Some(_) => {
                // JSON strings have no line feed; the next line is delimited again.
                self.nesting.in_string = false;
                self.line += 1;
            }
            None => {}
        }
        (used, None)
    }

    /// Reads one byte of an array outside strings.
    fn element(&mut self, byte: u8) -> (usize, Option<RawRow>) {
        let between = self.nesting.closers.is_empty();
        match byte {
            b',' if between => return (1, self.take(false)),
            b']' if between => {
                self.mode = Mode::Start;
                return (1, self.take(false));
            }
            b'{' | b'[' if between && self.row_bytes > 0 => return (0, self.take(false)),
            b'{' => self.nesting.enter(b'}'),
            b'[' => self.nesting.enter(b']'),
            b'}' | b']' => self.nesting.leave(byte),
            b'"' => self.nesting.in_string = true,
            _ => {}
        }
        self.push(&[byte]);
        self.line += u64::from(byte == b'\n');
        (1, None)
    }

    /// Adds bytes to the row, without leading white space.
    fn push(&mut self, mut bytes: &[u8]) {
        if self.row_bytes == 0 {
            let begin = bytes.iter().position(|&byte| !is_space(byte)).unwrap_or(bytes.len());
            bytes = &bytes[begin..];
            self.row_line = self.line;
        }
        self.row_bytes += bytes.len() as u64;
        if self.row_bytes <= self.max_row_bytes {
            self.row.extend_from_slice(bytes);
        } else {
            self.row = Vec::new();
        }
    }

    /// Takes the row read so far, if any.
    fn take(&mut self, truncated: bool) -> Option<RawRow> {
        let bytes = std::mem::take(&mut self.row_bytes);
        let mut row = std::mem::take(&mut self.row);
        if bytes == 0 {
            return None;
        }
        let end = row.iter().rposition(|&byte| !is_space(byte)).map_or(0, |last| last + 1);
        row.truncate(end);
        let content = if bytes > self.max_row_bytes { RowContent::TooLarge { bytes } } else { RowContent::Bytes(row) };
        Some(RawRow { line: self.row_line, truncated, content })
    }
}

impl Nesting {
    fn enter(&mut self, end: u8) {
        if self.closers.len() < REMEMBERED_DEPTH {
            self.closers.push(end);
        } else {
            self.deeper += 1;
        }
    }

    /// Closes the innermost bracket of this kind and all inside it; ignores a bracket that closes nothing.
    fn leave(&mut self, end: u8) {
        if self.deeper > 0 {
            self.deeper -= 1;
        } else if let Some(depth) = self.closers.iter().rposition(|&closer| closer == end) {
            self.closers.truncate(depth);
        }
    }
}

fn is_space(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t' | b'\n' | b'\r')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    /// All rows of `text`, fed in pieces whose sizes repeat.
    fn rows(text: &[u8], pieces: &[usize], max: u64) -> Vec<RawRow> {
        let mut splitter = Splitter::new(max);
        let (mut found, mut rest, mut sizes) = (Vec::new(), text, pieces.iter().cycle());
        while !rest.is_empty() {
            let size = sizes.next().map_or(rest.len(), |&size| size.clamp(1, rest.len()));
            let mut piece = &rest[..size];
            rest = &rest[size..];
            while !piece.is_empty() {
                let (used, row) = splitter.feed(piece);
                piece = &piece[used..];
                found.extend(row);
            }
        }
        found.extend(splitter.finish(false));
        found
    }

    fn texts(text: &str) -> Vec<(u64, String)> {
        let text_of = |row: RawRow| (row.line, String::from_utf8(row.content.bytes().unwrap().to_vec()).unwrap());
        rows(text.as_bytes(), &[], 1 << 20).into_iter().map(text_of).collect()
    }

    fn json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
            "[\\[\\]{},:\"\\\\\n ]{0,8}".prop_map(Value::from),
        ];
        leaf.prop_recursive(4, 32, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
                prop::collection::vec(("[\\[\\]{},\"\\\\a]{0,4}", inner), 0..6)
                    .prop_map(|pairs| Value::from(pairs.into_iter().collect::<serde_json::Map<_, _>>())),
            ]
        })
    }

    fn space() -> impl Strategy<Value = String> {
        "[ \t\r\n]{0,4}"
    }

    /// A value, written in one line or in many, between spaces.
    fn element() -> impl Strategy<Value = (String, Value, bool, String)> {
        (space(), json(), any::<bool>(), space())
    }

    fn written(value: &Value, pretty: bool) -> String {
        if pretty { serde_json::to_string_pretty(value).unwrap() } else { value.to_string() }
    }

    proptest! {
        #[test]
        fn an_array_splits_as_serde_parses_it(
            elements in prop::collection::vec(element(), 0..8),
            around in (space(), space()),
            pieces in prop::collection::vec(1usize..40, 1..5),
        ) {
            let mut text = format!("{}[", around.0);
            let mut lines = Vec::new();
            for (i, (before, value, pretty, after)) in elements.iter().enumerate() {
                text += if i > 0 { "," } else { "" };
                text += before;
                lines.push(1 + text.matches('\n').count() as u64);
                text += &written(value, *pretty);
                text += after;
            }
            text += "]";
            text += &around.1;
            let found = rows(text.as_bytes(), &pieces, 1 << 20);
            let whole: Vec<Value> = serde_json::from_str(&text).unwrap();
            let parsed: Vec<Value> =
                found.iter().map(|row| serde_json::from_slice(row.content.bytes().unwrap()).unwrap()).collect();
            prop_assert_eq!(parsed, whole);
            prop_assert!(found.iter().all(|row| !row.truncated));
            prop_assert_eq!(found.iter().map(|row| row.line).collect::<Vec<_>>(), lines);
        }

        #[test]
        fn lines_split_as_serde_parses_each(
            values in prop::collection::vec(json(), 1..8),
            blank in 0usize..3,
            ends in prop_oneof![Just("\n"), Just("\r\n"), Just(" \n")],
            pieces in prop::collection::vec(1usize..40, 1..5),
        ) {
            // A file that begins with an array is one array; `arrays_between_lines_are_rows` has the other case.
            prop_assume!(!values[0].is_array());
            let text: String = values.iter().map(|value| format!("{value}{}", ends.repeat(1 + blank))).collect();
            let found = rows(text.as_bytes(), &pieces, 1 << 20);
            let parsed: Vec<Value> =
                found.iter().map(|row| serde_json::from_slice(row.content.bytes().unwrap()).unwrap()).collect();
            prop_assert_eq!(parsed, values);
            for (i, row) in found.iter().enumerate() {
                prop_assert_eq!(row.line, (1 + i * (1 + blank)) as u64);
            }
        }

        #[test]
        fn a_cut_array_loses_its_last_row_only(values in prop::collection::vec(json(), 1..6), cut in any::<prop::sample::Index>()) {
            let text = Value::from(values.clone()).to_string();
            let cut = 1 + cut.index(text.len() - 1);
            let found = rows(&text.as_bytes()[..cut], &[], 1 << 20);
            let (last, before) = found.split_last().unwrap();
            prop_assert!(last.truncated);
            for (row, value) in before.iter().zip(&values) {
                prop_assert_eq!(&serde_json::from_slice::<Value>(row.content.bytes().unwrap()).unwrap(), value);
            }
        }

        #[test]
        fn any_bytes_split_alike_in_any_pieces(
            bytes in prop::collection::vec(prop_oneof![any::<u8>(), prop::sample::select(b"[]{},\"\\\n ".to_vec())], 0..200),
            pieces in prop::collection::vec(1usize..20, 1..5),
            max in 0u64..64,
        ) {
            prop_assert_eq!(rows(&bytes, &pieces, max), rows(&bytes, &[], max));
        }
    }

    #[test]
    fn arrays_between_lines_are_rows() {
        assert_eq!(texts("{}\n[1]\n\n2"), [(1, "{}".into()), (2, "[1]".into()), (4, "2".into())]);
    }

    #[test]
    fn a_byte_order_mark_is_no_row() {
        assert_eq!(texts("\u{feff}[1,2]"), [(1, "1".into()), (1, "2".into())]);
        assert_eq!(texts("\u{feff}{}\n"), [(1, "{}".into())]);
    }

    #[test]
    fn after_an_array_come_further_documents() {
        assert_eq!(texts("[1]\n[2,\n3]\n{}\n"), [(1, "1"), (2, "2"), (3, "3"), (4, "{}")].map(|(l, t)| (l, t.into())));
    }

    #[test]
    fn damage_stays_in_its_row() {
        let good = "{\"a\":1}";
        for bad in ["{\"a\":[1}", "{\"a\":1]}", "{\"a\":\"x\n}", "{\"a\":1}}", "", "{\"a\":{]}}", "{\"a\":\"\\\n}"] {
            let text = format!("[{good},{bad},{good}\n,{good}]");
            let found: Vec<_> = texts(&text).into_iter().map(|(_, text)| text).filter(|text| text == good).collect();
            assert_eq!(found.len(), 3, "{text}");
        }
        assert_eq!(texts(&format!("[{good}{good}\n{good}]")).len(), 3);
    }

    #[test]
    fn a_huge_row_is_counted_and_not_kept() {
        let text = format!("[1, [\"{}\"], 2]", "x".repeat(1000));
        let found = rows(text.as_bytes(), &[7], 100);
        assert_eq!(found[1], RawRow { line: 1, truncated: false, content: RowContent::TooLarge { bytes: 1004 } });
        assert_eq!((found[0].content.bytes(), found[2].content.bytes()), (Some(&b"1"[..]), Some(&b"2"[..])));
        let mut splitter = Splitter::new(100);
        splitter.feed("[".repeat(100_000).as_bytes());
        assert!(splitter.nesting.closers.len() <= REMEMBERED_DEPTH && splitter.row.capacity() <= 200);
    }

    #[test]
    fn a_missing_end_shows_even_between_rows() {
        let last = |text: &str| {
            let row = rows(text.as_bytes(), &[], 100).pop()?;
            Some((row.truncated, String::from_utf8(row.content.bytes()?.to_vec()).unwrap()))
        };
        assert_eq!(last("[1,"), Some((true, String::new())));
        assert_eq!(last("["), Some((true, String::new())));
        assert_eq!(last("[1"), Some((true, "1".into())));
        assert_eq!(last("[1]"), Some((false, "1".into())));
        assert_eq!(last("1\n"), Some((false, "1".into())));
        assert_eq!(last(""), None);
    }
}
