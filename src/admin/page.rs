//! Status page: one HTML document with inline style and script, assembled at compile time.

use sha2::{Digest, Sha256};
use std::sync::LazyLock;

const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = concat!(
    "(() => {\n\"use strict\";\n",
    include_str!("page/format.js"),
    include_str!("page/draw.js"),
    include_str!("page/live.js"),
    "})();\n"
);
const HEAD: &str = include_str!("page/head.html");
const BODY: &str = include_str!("page/body.html");

/// HTML document.
pub static DOCUMENT: LazyLock<String> = LazyLock::new(|| {
    format!("{HEAD}<style>{STYLE}</style>\n</head>\n{BODY}<script>{SCRIPT}</script>\n</body>\n</html>\n")
});

/// Content security policy: allows the inline script and style by hash, and requests to this server only.
pub static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash = |text: &str| format!("'sha256-{}'", base64(&Sha256::digest(text.as_bytes())));
    format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        hash(SCRIPT),
        hash(STYLE)
    )
});

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let word = three.iter().fold(0u32, |word, byte| word << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for index in 0..4 {
            let digit = DIGITS[(word >> (18 - 6 * index) & 63) as usize];
            text.push(if index <= three.len() { digit.into() } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Test vectors of RFC 4648.
    #[test]
    fn base64_matches_the_rfc() {
        for (text, coded) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg=="), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(text.as_bytes()), coded);
        }
    }

    #[test]
    fn the_page_loads_nothing_else_and_satisfies_its_policy() {
        for foreign in ["http://", "https://", "src=", "@import", "url(", "innerHTML", "eval(", " style=\"", " onclick"]
        {
            let found = DOCUMENT.matches(foreign).count();
            // SVG's namespace is an identifier; browsers do not fetch it.
            let allowed = if foreign == "http://" { DOCUMENT.matches("http://www.w3.org/2000/svg").count() } else { 0 };
            assert_eq!(found, allowed, "{foreign} is in the page");
        }
        assert!(DOCUMENT.matches("<script>").count() == 1 && DOCUMENT.matches("<style>").count() == 1);
        assert!(!SCRIPT.contains("</script") && !STYLE.contains("</style"));
    }

    #[test]
    fn no_part_of_the_page_is_long() {
        for (name, text) in [
            ("page.css", STYLE),
            ("format.js", include_str!("page/format.js")),
            ("draw.js", include_str!("page/draw.js")),
            ("live.js", include_str!("page/live.js")),
            ("body.html", BODY),
        ] {
            assert!(text.lines().count() <= 500, "{name} has {} lines", text.lines().count());
        }
    }
}
