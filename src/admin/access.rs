//! Access control of commands: checks Origin, Host and token of a request.

use crate::common::token::Token;
use axum::http::{HeaderMap, header};
use std::net::IpAddr;

/// Reason to refuse a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The request comes from a page of another site.
    Origin,
    /// The Host header does not name this machine's loopback, which may be DNS rebinding.
    Host,
    /// The token is missing or wrong.
    Token,
}

impl Refusal {
    /// Value of the metrics label `reason`.
    pub fn reason(self) -> &'static str {
        match self {
            Refusal::Origin => "origin",
            Refusal::Host => "host",
            Refusal::Token => "token",
        }
    }

    /// Sentence of the response.
    pub fn sentence(self) -> &'static str {
        match self {
            Refusal::Origin => {
                "commands are accepted from this server's own page only; this one came from another site"
            }
            Refusal::Host => {
                "without a token, requests are accepted for localhost, 127.0.0.1 and [::1] only; use one of these, or set \
                 admin.token_file"
            }
            Refusal::Token => "commands need the token of admin.token_file: Authorization: Bearer TOKEN",
        }
    }
}

/// Checks the headers of a command.
///
/// With a token, the request must carry it. Without one, only this machine reaches the port, so the remaining risk is a local
/// browser that shows another site.
///
/// # Errors
/// The reason to refuse the command.
pub fn admit(headers: &HeaderMap, token: Option<&Token>) -> Result<(), Refusal> {
    let text = |name| headers.get(name).map(|value: &header::HeaderValue| value.to_str().unwrap_or("?"));
    let host = text(header::HOST.as_str()).unwrap_or_default();
    if let Some(site) = text("sec-fetch-site")
        && !matches!(site, "same-origin" | "none")
    {
        return Err(Refusal::Origin);
    }
    if let Some(origin) = text(header::ORIGIN.as_str()) {
        let authority = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        if authority.is_none_or(|authority| !authority.eq_ignore_ascii_case(host)) {
            return Err(Refusal::Origin);
        }
    }
    match token {
        None if !is_loopback(host) => Err(Refusal::Host),
        None => Ok(()),
        Some(token) => {
            let given = text(header::AUTHORIZATION.as_str()).and_then(|value| value.split_once(' '));
            let given = given.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
            match given.is_some_and(|(_, secret)| token.matches(secret.trim())) {
                true => Ok(()),
                false => Err(Refusal::Token),
            }
        }
    }
}

/// True if the Host header is absent, as in HTTP/1.0, or names this machine's loopback.
pub fn is_local(headers: &HeaderMap) -> bool {
    headers.get(header::HOST).is_none_or(|host| host.to_str().is_ok_and(is_loopback))
}

/// True if a Host header names this machine's loopback. Any port is accepted, because a tunnel may change it.
fn is_loopback(host: &str) -> bool {
    let split = match host.strip_prefix('[') {
        Some(rest) => rest.split_once(']'),
        None => Some(host.split_at(host.find(':').unwrap_or(host.len()))),
    };
    let Some((name, port)) = split else { return false };
    if !port.strip_prefix(':').unwrap_or(port).bytes().all(|byte| byte.is_ascii_digit()) {
        return false;
    }
    name.eq_ignore_ascii_case("localhost") || name.parse().is_ok_and(|address: IpAddr| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECRET: &str = "0123456789abcdef0123";

    fn head(fields: &[(&'static str, &str)]) -> HeaderMap {
        fields.iter().map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap())).collect()
    }

    #[test]
    fn other_sites_are_refused() {
        let own = ("host", "127.0.0.1:9464");
        for (fields, expected) in [
            (vec![own], Ok(())),
            (vec![("host", "LOCALHOST:1")], Ok(())),
            (vec![("host", "[::1]:9464")], Ok(())),
            (vec![own, ("origin", "http://127.0.0.1:9464"), ("sec-fetch-site", "same-origin")], Ok(())),
            (vec![own, ("origin", "http://127.0.0.1:9465")], Err(Refusal::Origin)),
            (vec![own, ("origin", "http://evil.example")], Err(Refusal::Origin)),
            (vec![own, ("origin", "null")], Err(Refusal::Origin)),
            (vec![own, ("sec-fetch-site", "cross-site")], Err(Refusal::Origin)),
            // Another port of this machine belongs to another program.
            (vec![own, ("sec-fetch-site", "same-site")], Err(Refusal::Origin)),
            // DNS rebinding: the browser sees the same origin.
            (vec![("host", "evil.example:9464"), ("origin", "http://evil.example:9464")], Err(Refusal::Host)),
            (vec![("host", "127.0.0.1.evil.example")], Err(Refusal::Host)),
            (vec![("host", "[::1].evil.example")], Err(Refusal::Host)),
            (vec![("host", "10.0.0.1:9464")], Err(Refusal::Host)),
            (vec![], Err(Refusal::Host)),
        ] {
            assert_eq!(admit(&head(&fields), None), expected, "{fields:?}");
        }
    }

    #[test]
    fn a_configured_token_is_required_from_every_client() {
        let token = Token::new(SECRET);
        for (given, admitted) in [
            (format!("Bearer {SECRET}"), true),
            (format!("bearer  {SECRET} "), true),
            (format!("Basic {SECRET}"), false),
            (format!("Bearer {SECRET}x"), false),
            (format!("Bearer {}", &SECRET[1..]), false),
            ("Bearer ".into(), false),
            (SECRET.into(), false),
        ] {
            let fields = [("host", "draftmill.example"), ("authorization", given.as_str())];
            assert_eq!(admit(&head(&fields), Some(&token)).is_ok(), admitted, "{given}");
            let elsewhere = [&fields[..], &[("origin", "https://evil.example")]].concat();
            assert_eq!(admit(&head(&elsewhere), Some(&token)), Err(Refusal::Origin), "{given}");
        }
        assert_eq!(admit(&head(&[("host", "localhost")]), Some(&token)), Err(Refusal::Token));
        assert!(!format!("{token:?}").contains(SECRET));
    }

    #[test]
    fn a_token_file_is_trimmed_and_validated() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        let absent = Token::read(&path).unwrap_err();
        assert!(absent.contains("cannot be read"), "{absent}");
        for text in ["", "\n", "short", "two words of some length"] {
            std::fs::write(&path, text).unwrap();
            let error = Token::read(&path).unwrap_err();
            assert!(error.contains("holds no token") && !error.contains("words"), "{error}");
        }
        std::fs::write(&path, format!("  {SECRET}\r\n")).unwrap();
        assert!(Token::read(&path).unwrap().matches(SECRET));
    }
}
