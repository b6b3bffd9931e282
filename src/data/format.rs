//! Recognition of files that hold no rows, by their first bytes, and of paths that name no file.

use serde::de::IgnoredAny;
use std::path::Path;

/// Bytes of a file that are enough to recognise it.
pub const HEAD: usize = 1 << 16;

const MAGIC: [(&[u8], &str, &str); 26] = [
    (b"PAR1", "a Parquet file", PARQUET),
    (b"PARE", "an encrypted Parquet file", PARQUET),
    (b"ARROW1", "an Arrow file", ARROW),
    (b"FEA1", "a Feather file", ARROW),
    (b"ORC", "an ORC file", "convert it to JSONL"),
    (b"Obj\x01", "an Avro file", "convert it to JSONL"),
    (b"\x28\xb5\x2f\xfd", "compressed by zstd", "decompress it with zstd -d, or compress it with gzip"),
    (b"\xfd7zXZ\0", "compressed by xz", "decompress it with xz -d, or compress it with gzip"),
    (b"\x04\x22\x4d\x18", "compressed by lz4", "decompress it with lz4 -d, or compress it with gzip"),
    (b"\xff\x06\0\0sNaPpY", "compressed by snappy", "decompress it, or compress it with gzip"),
    (b"\x1f\x9d", "compressed by compress", "decompress it with uncompress, or compress it with gzip"),
    (b"\x1f\x8b", "gzip data inside gzip data", "decompress it once with gzip -d"),
    (b"PK\x03\x04", "a zip archive", "unpack it and give the files in it"),
    (b"PK\x05\x06", "an empty zip archive", "give a file with rows"),
    (b"PK\x07\x08", "a part of a zip archive", "unpack it and give the files in it"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive", "unpack it and give the files in it"),
    (b"Rar!\x1a\x07", "a rar archive", "unpack it and give the files in it"),
    (b"\x89HDF\r\n", "an HDF5 file", "convert it to JSONL"),
    (b"\x93NUMPY", "a NumPy file", "convert it to JSONL"),
    (b"SQLite format 3\0", "an SQLite database", "export its rows as JSONL"),
    (b"GGUF", "a GGUF file", "data.inputs are conversations; draftmill import reads GGUF files"),
    (b"%PDF", "a PDF file", "give a file with conversations"),
    (b"\x89PNG", "an image", "give a file with conversations"),
    (b"\x7fELF", "a program", "give a file with conversations"),
    (b"version https://git-lfs.github.com/spec/", "a pointer of Git LFS", "fetch the data with git lfs pull"),
    (b"/annex/objects/", "a pointer of git-annex", "fetch the data with git annex get"),
];
const PARQUET: &str = "convert it to JSONL, for example with pandas: \
    read_parquet(\"in\").to_json(\"out.jsonl\", orient=\"records\", lines=True)";
const ARROW: &str = "convert it to JSONL, for example with datasets: \
    Dataset.from_file(\"in\").to_json(\"out.jsonl\")";
const RECODE: &str = "convert it to UTF-8, for example with iconv -f UTF-16 -t UTF-8";

/// Sentence for a file that begins with `head` and holds no rows: its format and the remedy. `None` if it may hold rows.
pub fn foreign(head: &[u8]) -> Option<String> {
    let (what, remedy) = binary(head).or_else(|| text(head))?;
    Some(format!("is {what}, not JSONL or a JSON array; {remedy}"))
}

/// Reason and remedy for a path that names no file.
pub fn no_such_file(path: &Path) -> Option<String> {
    let text = path.to_string_lossy();
    if text == "~" || text.starts_with("~/") || (text.starts_with('~') && text.contains('/')) {
        return Some("does not exist; `~` is not expanded here, so write the whole path".into());
    }
    if let Some((scheme, rest)) = text.split_once(':')
        && scheme.len() > 1
        && scheme.chars().all(|c| c.is_ascii_alphanumeric() || c == '+')
    {
        return Some(match scheme {
            "file" => format!("is an address, not a path; write {}", rest.trim_start_matches("//")),
            "hf" => {
                "is a data set of the Hugging Face hub; fetch it first, for example with hf download, and give its \
                     files as JSONL"
                    .into()
            }
            _ => "is an address, not a path; fetch the file first".into(),
        });
    }
    if text.contains(['*', '?', '[', '{']) {
        return Some("does not exist; patterns are not expanded here, so list each file".into());
    }
    if text.contains('$') {
        return Some("does not exist; variables are not expanded here, so write the whole path".into());
    }
    let hub = path.is_relative() && path.components().count() == 2 && path.extension().is_none();
    hub.then(|| "does not exist; if it is a data set of the Hugging Face hub, fetch it first and give its files".into())
}

type Found = (&'static str, &'static str);

fn binary(head: &[u8]) -> Option<Found> {
    if let Some((_, what, remedy)) = MAGIC.iter().find(|(magic, ..)| head.starts_with(magic)) {
        return Some((what, remedy));
    }
    let byte = |at: usize| head.get(at).copied();
    if is_tar(head) {
        return Some(("a tar archive", "unpack it and give the files in it"));
    }
    match head {
        [b'B', b'Z', b'h', b'1'..=b'9', b'1', b'A', b'Y', ..] => {
            Some(("compressed by bzip2", "decompress it with bzip2 -d, or compress it with gzip"))
        }
        [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
            Some(("compressed by zstd", "decompress it with zstd -d, or compress it with gzip"))
        }
        // An Arrow stream begins with a continuation mark and the size of its schema.
        [0xff, 0xff, 0xff, 0xff, _, _, _, 0, ..] => Some(("an Arrow stream", ARROW)),
        [0xff, 0xfe, 0, 0, ..] | [0, 0, 0xfe, 0xff, ..] | [0, 0, 0, b'{' | b'[', ..] => {
            Some(("UTF-32 text", "convert it to UTF-8, for example with iconv -f UTF-32 -t UTF-8"))
        }
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => Some(("UTF-16 text", RECODE)),
        [first, 0, ..] | [0, first, ..] if first.is_ascii_graphic() => Some(("UTF-16 text", RECODE)),
        [0x80, 2..=5, ..] => Some(("a Python pickle", "write its rows as JSONL")),
        [_, _, _, _, _, _, 0, 0, b'{', ..] => {
            Some(("a safetensors file", "data.inputs are conversations or token ids as JSON"))
        }
        _ if byte(0) == Some(0) && head.iter().all(|&byte| byte == 0) => {
            Some(("zeros only, as an interrupted download leaves it", "fetch it again"))
        }
        _ => None,
    }
}

/// True for the header of a tar archive, also of the form without a magic word: its checksum is right.
fn is_tar(head: &[u8]) -> bool {
    let Some(header) = head.get(..512) else { return false };
    let (before, rest) = header.split_at(148);
    let (field, after) = rest.split_at(8);
    let digits: String = field.iter().map(|&byte| char::from(byte)).collect();
    let stated = u64::from_str_radix(digits.trim_matches(['\0', ' ']), 8);
    let sum: u64 = before.iter().chain(after).map(|&byte| u64::from(byte)).sum::<u64>() + 8 * u64::from(b' ');
    stated == Ok(sum) && header[0] != 0
}

fn text(head: &[u8]) -> Option<Found> {
    let head = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let text = String::from_utf8_lossy(head);
    let text = text.trim_start();
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let first = lines.next()?.trim();
    if text.starts_with('<') {
        let web =
            ["<!doctype", "<html", "<head", "<body"].iter().any(|tag| first.to_ascii_lowercase().starts_with(tag));
        return Some(match web {
            true => ("an HTML page, perhaps the answer of a server instead of the file", "fetch the file again"),
            false => ("XML or HTML", "convert it to JSONL"),
        });
    }
    if first.starts_with('{') {
        return pretty(first, lines.next());
    }
    if head.len() >= HEAD && !text.trim_end_matches('\n').contains('\n') {
        return None;
    }
    let row = |line: &str| line.trim_start().starts_with(['{', '[']);
    if row(first) || lines.clone().any(row) || serde_json::from_str::<IgnoredAny>(first).is_ok() {
        return None;
    }
    let second = lines.next().unwrap_or_default();
    if first.starts_with("---") || first.starts_with("- ") || (first.ends_with(':') && second.starts_with([' ', '-'])) {
        return Some(("YAML", "convert it to JSONL"));
    }
    let separator = [',', '\t', ';'].into_iter().find(|&separator| first.contains(separator));
    if separator.is_some_and(|separator| second.is_empty() || second.contains(separator)) {
        return Some(("CSV or other text", "write one JSON object with the turns of a conversation in each line"));
    }
    None
}

/// Objects over several lines. A damaged row is none: it does not end at an opening bracket before an indented key.
fn pretty(first: &str, second: Option<&str>) -> Option<Found> {
    let opens = first.ends_with(['{', '[']);
    let indented = second.is_some_and(|line| line.starts_with([' ', '\t']) || line.trim_start().starts_with('"'));
    let cut = serde_json::from_str::<IgnoredAny>(first).is_err_and(|error| error.is_eof());
    (opens && indented && cut).then_some((
        "an object over several lines",
        "write one row in each line: jq -c . for rows one after another, jq -c '.data[]' for rows under the key `data`",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_not_foreign_and_other_files_are() {
        for rows in [
            "{\"messages\": []}\n",
            "[{}]",
            "  \n{}",
            "\u{feff}[",
            "# header\n{}",
            "1\n2\n",
            "",
            " \n",
            "{",
            "[",
            "[\n",
            "{\"a\": [\n{}",
            "no row\n",
            "\0\0{}\n",
            "{\"a\": \"x\n{\"a\": 1}\n",
            "[\n  {\n",
            "null\n",
        ] {
            assert_eq!(foreign(rows.as_bytes()), None, "{rows:?}");
        }
        for (file, word) in [
            ("role,content\nuser,hi\n", "CSV"),
            ("\"role\",\"content\"\n\"user\",\"hi\"\n", "CSV"),
            ("role\tcontent\nuser\thi", "CSV"),
            ("- role: user\n  content: x\n", "YAML"),
            ("messages:\n  - role: user\n", "YAML"),
            ("<?xml version=\"1.0\"?>", "XML"),
            ("\n<html>", "HTML page"),
            ("{\n  \"data\": [\n", "several lines"),
            ("{\0\"\0", "UTF-16"),
            ("\0{\0\"", "UTF-16"),
        ] {
            let said = foreign(file.as_bytes()).unwrap_or_default();
            assert!(said.contains(word) && said.contains("; "), "{file:?}: {said}");
        }
    }

    #[test]
    fn an_old_tar_archive_has_no_magic_word_but_a_checksum() {
        let mut header = [0_u8; 512];
        header[..7].copy_from_slice(b"a.jsonl");
        header[100..107].copy_from_slice(b"0000644");
        let sum: u64 = header.iter().map(|&byte| u64::from(byte)).sum::<u64>() + 8 * 32;
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        let file = [&header[..], b"{\"messages\": []}\n{\"messages\": []}\n"].concat();
        assert!(foreign(&file).unwrap().contains("tar"));
    }

    #[test]
    fn paths_that_need_a_shell_or_a_client_are_named() {
        for (path, word) in [
            ("~/a.jsonl", "`~`"),
            ("~me/a.jsonl", "`~`"),
            ("data/*.jsonl", "patterns"),
            ("data/{a,b}.jsonl", "patterns"),
            ("hf:owner/name", "Hugging Face"),
            ("hf://datasets/owner/name", "Hugging Face"),
            ("s3://bucket/a", "address"),
            ("https://example.org/a.jsonl", "address"),
            ("file:///data/a.jsonl", "write /data/a.jsonl"),
            ("$HOME/a.jsonl", "variables"),
            ("owner/name", "Hugging Face"),
        ] {
            assert!(no_such_file(Path::new(path)).unwrap_or_default().contains(word), "{path}");
        }
        assert_eq!(no_such_file(Path::new("/data/a.jsonl")), None);
    }
}
